"""Compare runs with a million clients with runs with a hundred clients, and with pfl-research.

    python benchmarks/many_clients.py [--clients 1000000] [--rows 2000000] [--python /path/to/python/with/pfl]

Rows of 16 numbers, divided iid among the clients; a logistic model, 20 rounds, 50 clients per round, one step of SGD
each; FedAvg, and SCAFFOLD, which has client state. Each run is measured from the start to the end of its processes:
imports, data, partition, rounds, and with fedmpi the run directory with its checkpoints. One thread per rank, one
process or three ranks (gloo). Wall seconds and processor seconds of all ranks are medians of processes that run in
turn; memory is the peak of a process (of the largest one of three ranks). pfl-research (`pip install pfl`, or --python
with an interpreter that has it) trains the same with FedAvg in one process; if it is not installed, a message says so.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measure import HERE, mpirun_command, print_result
from peers import PEERS, find_installed_version

sys.path.insert(0, str(HERE / "adapters"))
from task import BATCH, COHORT, LR, numbers, report_peak

FEW = 100
PFL = HERE / "adapters" / "pfl_many_clients.py"


def make_rows(root: Path, *, n: int, tests: int = 1000):
    """Return a data set of random numbers; a data source of the config."""
    from fedmpi.data.dataset import Dataset

    x, y = numbers(n + tests)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes=int(y.max()) + 1)


def run_rank(args):
    """Run one rank of a fedmpi run, and print its peak memory."""
    import fedmpi
    from fedmpi.config import Settings

    tree = {
        "name": "run",
        "output": args.folder,
        "rounds": args.rounds,
        "data": {
            "source": f"{Path(__file__).resolve()}:make_rows",
            "n": args.rows,
            "partition": {"scheme": "iid", "clients": args.clients},
        },
        "model": {"name": "logistic"},
        "method": {"name": args.inner},
        "train": {"steps": 1, "batch_size": BATCH, "lr": LR, "momentum": 0.0},
        "cohort": {"size": COHORT},
        "evaluate": {"every": 10**6},
        "comm": {"backend": "gloo" if args.ranks > 1 else "auto"},
    }
    sys.stdout, out = sys.stderr, sys.stdout
    fedmpi.run(Settings.model_validate(tree))
    sys.stdout = out
    report_peak()


def measure_command(words):
    """Run a command; return its seconds, its processor seconds, and the peak memory of its largest process in MiB."""
    began, before = time.perf_counter(), child_processor_seconds()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, capture_output=True, text=True, env=env)
    seconds, processor_s = time.perf_counter() - began, child_processor_seconds() - before
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: exit code {result.returncode}\n{result.stderr}")
    peaks = [json.loads(text)["peak"] for text in result.stdout.splitlines() if text.startswith('{"peak"')]
    return seconds, processor_s, max(peaks) / 2**20


def child_processor_seconds():
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_fedmpi(args, method, clients, ranks):
    """Run fedmpi in processes of its own; return seconds, processor seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, "--inner", method, "--folder", folder, "--clients", clients, "--ranks", ranks]
        words = [str(word) for word in [*words, "--rows", args.rows, "--rounds", args.rounds]]
        return measure_command(mpirun_command(ranks, *words) if ranks > 1 else [sys.executable, "-W", "ignore", *words])


def measure_pfl(args, clients):
    """Run pfl-research in a process of its own; return seconds, processor seconds and peak memory."""
    return measure_command([args.python, "-W", "ignore", str(PFL), *map(str, (clients, args.rows, args.rounds))])


def compare(what, turns, ours, theirs):
    """Run two sides in turn, and print a line each about their seconds, their processor seconds and their memory.

    ours, theirs: (name, function that returns the three numbers).
    """
    results = {name: [] for name, _ in (ours, theirs)}
    for _ in range(turns):
        for name, run in (ours, theirs):
            results[name].append(run())
    for i, (unit, digits, kind) in enumerate((("s", 2, ""), ("s", 2, ", processor"), ("MiB", 0, ", memory"))):
        sides = [(name, median(each[i] for each in results[name])) for name, _ in (ours, theirs)]
        print_result(f"{what}{kind}", *sides, unit=unit, digits=digits)


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has pfl")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        run_rank(args)
        return
    for ranks, where in ((1, "one process"), (3, "three ranks")):
        for method in ("fedavg", "scaffold"):
            sides = [
                (f"{clients:,} clients", lambda n=clients, m=method, r=ranks: measure_fedmpi(args, m, n, r))
                for clients in (args.clients, FEW)
            ]
            compare(f"{method}, {where}", args.turns, *sides)
    package, module = PEERS["pfl_research"]
    there = find_installed_version(args.python, package, module)
    if there is None:
        print(f"{package}: not installed", flush=True)
        return
    for clients in (args.clients, FEW):
        ours = "fedmpi", lambda n=clients: measure_fedmpi(args, "fedavg", n, 1)
        theirs = f"{package} {there}", lambda n=clients: measure_pfl(args, n)
        compare(f"fedavg, one process, {clients:,} clients", args.turns, ours, theirs)


if __name__ == "__main__":
    main()
