"""W4: compare the transfers of a round by fedmpi's communicators with direct calls of torch.distributed and MPI.

    python benchmarks/collectives.py [--ranks 4] [--d 1700000 25600000]

Over gloo and over MPI, on this host: the broadcast of d float32 from rank 0 to all (torch.distributed.broadcast;
MPI.Bcast), and one row of d from each other rank to rank 0, each into its row of one matrix (isend and irecv; Isend
and Irecv). fedmpi's calls check and count messages and have a time limit. With MPI, fedmpi pauses between tests, so
that a waiting rank takes no core, while the direct calls poll without pauses. The calls run in turn in one job, with a
barrier before each; results are medians of the seconds until the last rank is done.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from measure import print_result, run_in_turn, run_on_ranks
from vectors import create_process_group

from fedmpi.comm import connect, detect


def make_gloo_calls(comm, x, rows):
    """Return functions that broadcast x and gather rows by direct calls of torch.distributed."""

    def broadcast():
        dist.broadcast(x, 0)

    def gather():
        if comm.rank == 0:
            for work in [dist.irecv(rows[r], r) for r in range(1, comm.size)]:
                work.wait()
        else:
            dist.send(x, 0)

    return broadcast, gather, dist.barrier


def make_mpi_calls(comm, x, rows):
    """Return functions that broadcast x and gather rows by direct calls of MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def broadcast():
        world.Bcast(x.numpy(), 0)

    def gather():
        if comm.rank == 0:
            MPI.Request.Waitall([world.Irecv(rows[r].numpy(), r, 77) for r in range(1, comm.size)])
        else:
            world.Send(x.numpy(), 0, 77)

    return broadcast, gather, world.Barrier


def measure(comm, backend, d, repeats):
    """Run fedmpi's calls and direct calls in turn, and print the results for vectors of length d."""
    x, rows = torch.randn(d), torch.empty(comm.size if comm.rank == 0 else 0, d)

    def gather():
        incoming = [(r, rows[r]) for r in range(1, comm.size)] if comm.rank == 0 else []
        comm.exchange([] if comm.rank == 0 else [(0, x)], incoming)

    bare_broadcast, bare_gather, barrier = (make_mpi_calls if backend == "mpi" else make_gloo_calls)(comm, x, rows)

    def timed(call):
        """Return the seconds of a call until the last rank is done."""
        barrier()
        began = time.perf_counter()
        call()
        barrier()
        return time.perf_counter() - began

    calls = {
        "broadcast": (lambda: comm.broadcast(x), bare_broadcast),
        "gather of rows": (gather, bare_gather),
    }
    for name, (ours, bare) in calls.items():
        seconds = run_in_turn({"fedmpi": lambda f=ours: timed(f), "bare": lambda f=bare: timed(f)}, repeats)
        if comm.rank == 0:
            moved = 4 * d * (comm.size - 1) / seconds["fedmpi"] / 2**30
            what = f"{name}, {backend}, {comm.size} ranks, d={d:,}"
            pair = [(who, 1e3 * seconds[who]) for who in ("fedmpi", "bare")]
            print_result(what, *pair, unit="ms", note=f"{moved:.2f} GiB/s in all", digits=2)


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--d", type=int, nargs="+", default=[10_000, 1_700_000, 25_600_000], help="float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--backend", choices=["gloo", "mpi"], nargs="+", default=["gloo", "mpi"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = detect(os.environ)
    if job.size == 1:
        for backend in args.backend:
            words = ["--d", *args.d, "--repeats", args.repeats, "--backend", backend]
            run_on_ranks(args.ranks, __file__, *words)
        return
    (backend,) = args.backend
    comm = connect(job, backend)
    if backend == "gloo":
        create_process_group(comm)
    for d in args.d:
        measure(comm, backend, d, args.repeats)
    comm.close()


if __name__ == "__main__":
    main()
