"""W8: measure the exchange of a large model without training: 6 clients, each on a rank of its own.

    python benchmarks/exchange.py [--gib 0.25] [--ranks 7] [--backend gloo]

NVIDIA FLARE's tensor-stream example (a model of 3.4 GB, 6 clients) reports 155 s per round and 82 GiB on the server.
Here all ranks share one host, which needs memory for about 3 models per rank: --gib 3.2 needs about 70 GiB with seven
ranks, and 30 GiB with three ranks of three clients each. In a round w is broadcast to all ranks, every client uploads a
row of d entries to rank 0, and their weighted mean is added to w. bare: the same transfers by torch.distributed or MPI
in the same job, where each row is added to w in float32 when it arrives. The two run in turn; results are medians.
Memory is the increase of the peak (VmHWM) since before the rank had a model, in units of models: while model and
federation are built, and over whole rounds. root, sharded: server.placement. For root it is the memory of rank 0, with
a limit of 2.5; for sharded that of the rank with most, compared with m / W + 3, and the time is also compared with
root's.
"""

import argparse
import json
import os
import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from measure import print_result, read_memory_bytes, reset_peak_memory, run_on_ranks
from vectors import create_process_group, make_vector_federation, run_one_round

from fedmpi.comm import connect, detect

CLIENTS, ALLOWED = 6, 2.5


def bare(comm, w, row, world):
    """Make the transfers of one round by direct calls; rank 0 receives into `row` (d,), the other ranks send it."""
    if world is None:
        dist.broadcast(w, 0)
    else:
        world.Bcast(w.numpy(), 0)
    for k in range(CLIENTS):
        source = 1 + k % (comm.size - 1)
        if comm.rank == source:
            dist.send(row, 0) if world is None else world.Send(row.numpy(), 0, 77)
        elif comm.rank == 0:
            dist.recv(row, source) if world is None else world.Recv(row.numpy(), source, 77)
            w.add_(row, alpha=1 / CLIENTS)


def measure(args):
    """Run rounds on this rank, and print seconds and memory on rank 0."""
    comm = connect(detect(os.environ), args.backend)
    d = int(args.gib * 2**30) // 4
    reset_peak_memory()
    before = read_memory_bytes("VmRSS")
    fed = make_vector_federation(d, args.rounds + 2, comm, CLIENTS, epochs=0, placement=args.placement)
    models = {"made": (read_memory_bytes("VmHWM") - before) / (4 * d)}
    reset_peak_memory()
    for t in range(2):
        run_one_round(fed, t)
    models["in rounds"] = (read_memory_bytes("VmHWM") - before) / (4 * d)
    feds = [fed]
    if args.placement == "sharded":  # only now, because the memory of the sharded federation has been measured
        feds.append(make_vector_federation(d, args.rounds + 2, comm, CLIENTS, epochs=0))
    world = None
    if args.backend == "gloo":
        create_process_group(comm)
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    w, row = torch.zeros(d), torch.full((d,), 1e-6)  # not zeros, which take no memory until written, and read fast
    sides = [*(partial(run_one_round, each) for each in feds), lambda t: bare(comm, w, row, world)]
    seconds = [[] for _ in sides]
    for t in range(args.rounds):
        for side, taken in zip(sides, seconds, strict=True):
            comm.allgather_bytes(b"", 600)
            began = time.perf_counter()
            side(t + 2)
            taken.append(time.perf_counter() - began)
    every = [json.loads(text) for text in comm.allgather_bytes(json.dumps(models).encode(), 600)]
    if comm.rank == 0:
        ours, *root, theirs = map(median, seconds)
        what = f"exchange of {args.gib:g} GiB, {CLIENTS} clients, {comm.size} ranks, {args.backend}, {args.placement}"
        print_result(what, ("fedmpi", ours), ("bare transfers", theirs))
        for each in root:
            print_result(what, ("sharded", ours), ("root", each))
        whose, allowed = ("the fullest rank", CLIENTS / comm.size + 3) if root else ("rank 0", ALLOWED)
        for when in models:
            most = max(each[when] for each in every) if root else models[when]
            print_result(
                f"{what}, memory of {whose}, {when}", ("fedmpi", most), ("allowed", allowed), unit="models", digits=2
            )
    comm.close()


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="of the model")
    parser.add_argument("--ranks", type=int, default=CLIENTS + 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=["gloo", "mpi"], nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--placement", choices=["root", "sharded"], nargs="+", default=["root", "sharded"])
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inner:
        args.backend, args.placement = args.backend[0], args.placement[0]
        measure(args)
        return
    for backend in args.backend:
        for placement in args.placement:
            words = ["--gib", args.gib, "--rounds", args.rounds, "--backend", backend, "--placement", placement]
            run_on_ranks(args.ranks, __file__, "--inner", *words)


if __name__ == "__main__":
    main()
