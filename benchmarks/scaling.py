"""W5: a round by the number of ranks; its costs fitted, and what the fit says of 1,024 ranks.

    python benchmarks/scaling.py [--ranks 2 4 8 16] [--backend gloo]

Rank 0 serves, the others train; a client's training is a pause of --train seconds, as if a device of its own made it,
so that the ranks of one host do not take each other's cores. strong: 48 clients, whatever the ranks; weak: three a
rank. d = 10,000 and 1,000,000. Beside it the training alone: the busiest rank's clients, one after another; and
server.reduce: local, in turn with root.

What a round takes beside training is fitted, without negative terms, over all that was measured:

    seconds = alpha + beta * bytes through rank 0 + gamma * clients + delta * ranks + epsilon * bytes * log2(ranks)
              + zeta * clients of the busiest rank

with errors relative to what was measured. Its worth is said in two ways: each point by a fit without it, and the
largest number of ranks by a fit to the smaller ones. All ranks of this host share its cores and its memory's speed, and
use no network: what is said of 1,024 is of 1,024 ranks behind one such rank 0, and no more.
"""

import argparse
import json
import math
import os
import time
from statistics import median

import numpy as np
import torch
from measure import line, on_ranks
from scipy.optimize import nnls

from fedmpi.comm import connect, detect
from fedmpi.comm.base import Solo

STRONG, WEAK, D = 48, 3, (10_000, 1_000_000)
TERMS = (
    "a round",
    "a GB through rank 0",
    "a client",
    "a rank",
    "a GB and doubling of the ranks",
    "a client of the busiest rank",
)


def busiest(m, ranks):
    """Clients of the rank that trains most."""
    return math.ceil(m / max(ranks - 1, 1))


def terms(point):
    """What the costs of a point are multiplied with."""
    down, up = 4 * point["d"] * math.ceil(math.log2(point["ranks"])), 4 * point["d"] * point["clients"]
    gb = (4 * point["d"] + up) / 1e9
    return [1, gb, point["clients"], point["ranks"], down / 1e9, busiest(point["clients"], point["ranks"])]


def beside(point):
    return point["seconds"] - point["training"]


def fit(points):
    """The costs (6,), none negative, with the least sum of squared relative errors."""
    A = np.array([terms(p) for p in points])
    y = np.array([beside(p) for p in points])
    return nnls(A / y[:, None], np.ones(len(y)))[0]


def said(costs, point):
    return float(np.dot(costs, terms(point)))


def errors(points):
    """|predicted / measured - 1| of each point by a fit to the others."""
    found = []
    for i, point in enumerate(points):
        costs = fit(points[:i] + points[i + 1 :])
        found.append(abs(said(costs, point) / beside(point) - 1))
    return found


def measure(rounds, seconds):
    """This rank's part; the points that rank 0 has found. Started once per rank."""
    from vectors import federation, one_round

    job = detect(os.environ)
    comm = connect(job, os.environ.get("SCALING_BACKEND", "auto")) if job.size > 1 else Solo(torch.device("cpu"))
    points, ranks = [], comm.size
    for d in D:
        for kind, clients in (("strong", STRONG), ("weak", WEAK * max(ranks - 1, 1))):
            took = {"root": [], "local": []}
            feds = {way: federation(d, rounds + 1, comm, clients, seconds=seconds, reduce=way) for way in took}
            for t in range(rounds + 1):
                for way, fed in feds.items():
                    began = time.perf_counter()
                    one_round(fed, t)
                    took[way].append(time.perf_counter() - began)
            training, (root, local) = seconds * busiest(clients, ranks), (median(each[1:]) for each in took.values())
            point = {"kind": kind, "ranks": ranks, "clients": clients, "d": d, "training": training}
            points.append(point | {"seconds": root, "local": local})
    comm.close()
    return points if comm.rank == 0 else []


def show(points):
    """The fit, and what it says."""
    several = [p for p in points if p["ranks"] > 1]
    if len(several) <= len(TERMS):
        print(f"no fit: {len(several)} points for {len(TERMS)} costs; measure more numbers of ranks")
        return
    costs = fit(several)
    print("costs in ms: " + ", ".join(f"{1e3 * c:.3g} {term}" for c, term in zip(costs, TERMS, strict=True)))
    wrong, largest = errors(several), max(p["ranks"] for p in several)
    print(f"each point by a fit without it: median error {median(wrong):.0%}, the worst {max(wrong):.0%}")
    small = [p for p in several if p["ranks"] < largest]
    if len(small) > len(TERMS):
        fewer = fit(small)
        for p in several:
            if p["ranks"] == largest:
                what = f"{p['kind']} beside training, {largest} ranks, d={p['d']:,}, by a fit to fewer ranks"
                line(what, ("predicted", said(fewer, p)), ("measured", beside(p)))
    for d in D:
        for ranks in (64, 256, 1024):
            point = {"ranks": ranks, "clients": WEAK * (ranks - 1), "d": d}
            seconds, training = said(costs, point), WEAK * points[0]["pause"]
            note = f"extrapolated; {median(wrong):.0%} to {max(wrong):.0%} off where it could be checked"
            what = f"weak, {ranks} ranks, {point['clients']} clients, d={d:,}"
            line(what, ("fit", seconds + training), ("training alone", training), note=note)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", type=float, default=0.01, help="seconds a client")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.inner:
        points = measure(asked.rounds, asked.train)
        if points:
            print(json.dumps(points))
        return
    os.environ["SCALING_BACKEND"] = asked.backend
    points = []
    for ranks in asked.ranks:
        words = ["--inner", "--rounds", asked.rounds, "--train", asked.train]
        found = json.loads(on_ranks(ranks, __file__, *words, quiet=True).splitlines()[-1])
        for p in found:
            what = f"{p['kind']}, {p['ranks']} ranks, {p['clients']} clients, d={p['d']:,}"
            line(what, ("fedmpi", p["seconds"]), ("training alone", p["training"]))
            if ranks > 1 and p["d"] == max(D):  # the rows of fewer entries are not added up
                line(f"{what}, server.reduce", ("local", p["local"]), ("root", p["seconds"]))
        points += [p | {"pause": asked.train} for p in found]
    show(points)


if __name__ == "__main__":
    main()
