"""W5: measure the time of a round by the number of ranks, fit a cost model, and extrapolate it to 1,024 ranks.

    python benchmarks/scaling.py [--ranks 2 4 8 16] [--backend gloo]

Rank 0 is the server, the other ranks train. A client's training is a pause of --train seconds, as if it ran on a device
of its own, so that the ranks of one host do not compete for cores. strong: 48 clients for any number of ranks; weak:
three clients per rank. d = 10,000 and 1,000,000. For comparison: the time of the training alone, which is that of the
busiest rank's clients one after another; and server.reduce: local, in turn with root.

The time of a round in addition to training is fitted, without negative terms, over all measurements:

    seconds = alpha + beta * bytes through rank 0 + gamma * clients + delta * ranks + epsilon * bytes * log2(ranks)
              + zeta * clients of the busiest rank

with errors relative to the measurements. The quality of the fit is tested in two ways: each point is predicted by a fit
without it, and the largest number of ranks by a fit to the smaller ones. All ranks share the cores and the memory
bandwidth of this host, and use no network: the extrapolation is valid only for 1,024 ranks with such a rank 0.
"""

import argparse
import json
import math
import os
import time
from statistics import median

import numpy as np
import torch
from measure import print_result, run_on_ranks
from scipy.optimize import nnls

from fedmpi.comm import connect, detect
from fedmpi.comm.base import SingleProcess

STRONG, WEAK, D = 48, 3, (10_000, 1_000_000)
TERMS = (
    "a round",
    "a GB through rank 0",
    "a client",
    "a rank",
    "a GB and doubling of the ranks",
    "a client of the busiest rank",
)


def max_clients_per_rank(m, ranks):
    """Return the number of clients of the rank that trains most."""
    return math.ceil(m / max(ranks - 1, 1))


def cost_terms(point):
    """Return the six terms of a point, by which the costs of the fit are multiplied."""
    down, up = 4 * point["d"] * math.ceil(math.log2(point["ranks"])), 4 * point["d"] * point["clients"]
    gb = (4 * point["d"] + up) / 1e9
    return [1, gb, point["clients"], point["ranks"], down / 1e9, max_clients_per_rank(point["clients"], point["ranks"])]


def overhead_seconds(point):
    """Return the seconds of a round in addition to training."""
    return point["seconds"] - point["training"]


def fit_costs(points):
    """Return the non-negative costs (6,) with the least sum of squared relative errors."""
    A = np.array([cost_terms(p) for p in points])
    y = np.array([overhead_seconds(p) for p in points])
    return nnls(A / y[:, None], np.ones(len(y)))[0]


def predict_seconds(costs, point):
    """Return the seconds of a round that the fitted cost model predicts."""
    return float(np.dot(costs, cost_terms(point)))


def cross_validation_errors(points):
    """Return |predicted / measured - 1| of each point, predicted by a fit to the other points."""
    results = []
    for i, point in enumerate(points):
        costs = fit_costs(points[:i] + points[i + 1 :])
        results.append(abs(predict_seconds(costs, point) / overhead_seconds(point) - 1))
    return results


def measure(rounds, seconds):
    """Run the rounds on this rank, and return the measured points on rank 0. Called once per rank."""
    from vectors import make_vector_federation, run_one_round

    job = detect(os.environ)
    comm = (
        connect(job, os.environ.get("SCALING_BACKEND", "auto")) if job.size > 1 else SingleProcess(torch.device("cpu"))
    )
    points, ranks = [], comm.size
    for d in D:
        for kind, clients in (("strong", STRONG), ("weak", WEAK * max(ranks - 1, 1))):
            seconds_taken = {"root": [], "local": []}
            feds = {
                way: make_vector_federation(d, rounds + 1, comm, clients, seconds=seconds, reduce=way)
                for way in seconds_taken
            }
            for t in range(rounds + 1):
                for way, fed in feds.items():
                    began = time.perf_counter()
                    run_one_round(fed, t)
                    seconds_taken[way].append(time.perf_counter() - began)
            training, (root, local) = (
                seconds * max_clients_per_rank(clients, ranks),
                (median(each[1:]) for each in seconds_taken.values()),
            )
            point = {"kind": kind, "ranks": ranks, "clients": clients, "d": d, "training": training}
            points.append(point | {"seconds": root, "local": local})
    comm.close()
    return points if comm.rank == 0 else []


def print_fit(points):
    """Fit the costs, and print them with their errors and the extrapolation."""
    several = [p for p in points if p["ranks"] > 1]
    if len(several) <= len(TERMS):
        print(f"no fit: {len(several)} points for {len(TERMS)} costs; measure more numbers of ranks")
        return
    costs = fit_costs(several)
    print("costs in ms: " + ", ".join(f"{1e3 * c:.3g} {term}" for c, term in zip(costs, TERMS, strict=True)))
    wrong, largest = cross_validation_errors(several), max(p["ranks"] for p in several)
    print(f"each point by a fit without it: median error {median(wrong):.0%}, the worst {max(wrong):.0%}")
    small = [p for p in several if p["ranks"] < largest]
    if len(small) > len(TERMS):
        fewer = fit_costs(small)
        for p in several:
            if p["ranks"] == largest:
                what = f"{p['kind']} beside training, {largest} ranks, d={p['d']:,}, by a fit to fewer ranks"
                print_result(what, ("predicted", predict_seconds(fewer, p)), ("measured", overhead_seconds(p)))
    for d in D:
        for ranks in (64, 256, 1024):
            point = {"ranks": ranks, "clients": WEAK * (ranks - 1), "d": d}
            seconds, training = predict_seconds(costs, point), WEAK * points[0]["pause"]
            note = f"extrapolated; {median(wrong):.0%} to {max(wrong):.0%} off where it could be checked"
            what = f"weak, {ranks} ranks, {point['clients']} clients, d={d:,}"
            print_result(what, ("fit", seconds + training), ("training alone", training), note=note)


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", type=float, default=0.01, help="seconds a client")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inner:
        points = measure(args.rounds, args.train)
        if points:
            print(json.dumps(points))
        return
    os.environ["SCALING_BACKEND"] = args.backend
    points = []
    for ranks in args.ranks:
        words = ["--inner", "--rounds", args.rounds, "--train", args.train]
        results = json.loads(run_on_ranks(ranks, __file__, *words, quiet=True).splitlines()[-1])
        for p in results:
            what = f"{p['kind']}, {p['ranks']} ranks, {p['clients']} clients, d={p['d']:,}"
            print_result(what, ("fedmpi", p["seconds"]), ("training alone", p["training"]))
            if ranks > 1 and p["d"] == max(D):  # shorter rows are not summed by the ranks
                print_result(f"{what}, server.reduce", ("local", p["local"]), ("root", p["seconds"]))
        points += [p | {"pause": args.train} for p in results]
    print_fit(points)


if __name__ == "__main__":
    main()
