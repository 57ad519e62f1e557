"""A million clients beside a hundred, and beside pfl-research.

    python benchmarks/many_clients.py [--clients 1000000] [--rows 2000000] [--python /path/to/python/with/pfl]

Rows of 16 numbers, divided iid among the clients; a logistic model, 20 rounds, 50 clients a round, one step of SGD
each; FedAvg, and SCAFFOLD, of which clients keep state. Each side is a process of its own, from its start to its end:
imports, data, partition, rounds, and with fedmpi the run directory with its checkpoints. One thread a rank, one
process or three ranks (gloo). Seconds, and those of the processors that all ranks took, are medians of processes that
take turns; memory is the peak of a process (on three ranks of the largest). pfl-research (`pip install pfl`, or
--python for an interpreter that has it) trains the same with FedAvg in one process; where it is not installed that is
said.
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

from measure import HERE, line, mpirun
from peers import PEERS, version

sys.path.insert(0, str(HERE / "adapters"))
from task import BATCH, COHORT, LR, numbers, report_peak

FEW = 100
PFL = HERE / "adapters" / "pfl_many_clients.py"


def rows(root: Path, *, n: int, tests: int = 1000):
    """A data source: numbers at random."""
    from fedmpi.data.dataset import Dataset

    x, y = numbers(n + tests)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes=int(y.max()) + 1)


def inner(asked):
    """One rank of one fedmpi run, which prints its peak."""
    import fedmpi
    from fedmpi.config import Settings

    tree = {
        "name": "run",
        "output": asked.folder,
        "rounds": asked.rounds,
        "data": {
            "source": f"{Path(__file__).resolve()}:rows",
            "n": asked.rows,
            "partition": {"scheme": "iid", "clients": asked.clients},
        },
        "model": {"name": "logistic"},
        "method": {"name": asked.inner},
        "train": {"steps": 1, "batch_size": BATCH, "lr": LR, "momentum": 0.0},
        "cohort": {"size": COHORT},
        "evaluate": {"every": 10**6},
        "comm": {"backend": "gloo" if asked.ranks > 1 else "auto"},
    }
    sys.stdout, out = sys.stderr, sys.stdout
    fedmpi.run(Settings.model_validate(tree))
    sys.stdout = out
    report_peak()


def measured(words):
    """(seconds, processor seconds, peak in MiB of the largest process) of a command."""
    began, before = time.perf_counter(), processor()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    seconds, processor_s = time.perf_counter() - began, processor() - before
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr}")
    peaks = [json.loads(text)["peak"] for text in done.stdout.splitlines() if text.startswith('{"peak"')]
    return seconds, processor_s, max(peaks) / 2**20


def processor():
    """Processor seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fedmpi_run(asked, method, clients, ranks):
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, "--inner", method, "--folder", folder, "--clients", clients, "--ranks", ranks]
        words = [str(word) for word in [*words, "--rows", asked.rows, "--rounds", asked.rounds]]
        return measured(mpirun(ranks, *words) if ranks > 1 else [sys.executable, "-W", "ignore", *words])


def pfl_run(asked, clients):
    return measured([asked.python, "-W", "ignore", str(PFL), *map(str, (clients, asked.rows, asked.rounds))])


def compare(what, turns, ours, theirs):
    """Two sides, (name, function), take turns: a line for their seconds, their processor seconds, and their memory."""
    found = {name: [] for name, _ in (ours, theirs)}
    for _ in range(turns):
        for name, run in (ours, theirs):
            found[name].append(run())
    for i, (unit, digits, kind) in enumerate((("s", 2, ""), ("s", 2, ", processor"), ("MiB", 0, ", memory"))):
        sides = [(name, median(each[i] for each in found[name])) for name, _ in (ours, theirs)]
        line(f"{what}{kind}", *sides, unit=unit, digits=digits)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has pfl")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inner:
        inner(asked)
        return
    for ranks, where in ((1, "one process"), (3, "three ranks")):
        for method in ("fedavg", "scaffold"):
            sides = [
                (f"{clients:,} clients", lambda n=clients, m=method, r=ranks: fedmpi_run(asked, m, n, r))
                for clients in (asked.clients, FEW)
            ]
            compare(f"{method}, {where}", asked.turns, *sides)
    package, module = PEERS["pfl_research"]
    there = version(asked.python, package, module)
    if there is None:
        print(f"{package}: not installed", flush=True)
        return
    for clients in (asked.clients, FEW):
        ours = "fedmpi", lambda n=clients: fedmpi_run(asked, "fedavg", n, 1)
        theirs = f"{package} {there}", lambda n=clients: pfl_run(asked, n)
        compare(f"fedavg, one process, {clients:,} clients", asked.turns, ours, theirs)


if __name__ == "__main__":
    main()
