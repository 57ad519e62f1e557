"""Compare fedmpi with other programs, and with a loop by hand, on the same tasks.

    python benchmarks/peers.py [softmax cnn] [--python fluke_fl=/path/to/venv/bin/python ...]

softmax: 1,000 clients of 30 samples, 100 per round, batches of 10. cnn: 100 clients of 100 images, 10 per round, the
1.66 M-parameter CNN, batches of 50. One local epoch of SGD, one thread, one process, no evaluation if the program
allows that. Each side is a process of its own (adapters/NAME.py), since programs may need different versions of
packages: --python names the interpreter of a program. The processes run in turn; seconds are the median of all rounds
except the first one of each process. If a program is not installed, a message says so.
"""

import argparse
import json
import os
import subprocess
import sys
from statistics import median

from measure import HERE, print_result

ADAPTERS = HERE / "adapters"
PEERS = {  # adapter: (package, module that must be importable)
    "pfl_research": ("pfl", "pfl.algorithm.federated_averaging"),
    "fluke_fl": ("fluke-fl", "fluke"),
    "fedlab_alone": ("fedlab", "fedlab.core.standalone"),
    "flower": ("flwr", "flwr.simulation, ray"),
    "appfl_alone": ("appfl", "appfl.vsim"),
    "blazefl_alone": ("blazefl", "blazefl.contrib"),
}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # no usage statistics are sent
FOUND = "import importlib.metadata as m; import {module}; print(m.version('{package}'))"


def find_installed_version(python, package, module):
    """Return the version of an installed program; None if it cannot be imported."""
    words = [python, "-W", "ignore", "-c", FOUND.format(package=package, module=module)]
    result = subprocess.run(words, capture_output=True, text=True)
    return result.stdout.split()[-1] if result.returncode == 0 else None


def run(python, adapter, task, rounds):
    """Run a program's adapter, and return the seconds of each round except the first."""
    words = [python, "-W", "ignore", str(ADAPTERS / f"{adapter}.py"), task, str(rounds + 1)]
    result = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **QUIET})
    if result.returncode:
        raise SystemExit(f"{adapter}, {task}: exit code {result.returncode}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])[1:]


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["softmax", "cnn"])
    parser.add_argument("--rounds", type=int, default=10, help="of a process")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=INTERPRETER")
    args = parser.parse_args()
    given = dict(each.split("=", 1) for each in args.python)
    unknown = sorted(set(given) - set(PEERS))
    if unknown:
        parser.error(f"there is no adapter {unknown[0]}; there are {', '.join(PEERS)}")
    sides = {"fedmpi": (sys.executable, "fedmpi_itself"), "by hand": (sys.executable, "by_hand")}
    for peer, (package, module) in PEERS.items():
        python = given.get(peer, sys.executable)
        there = find_installed_version(python, package, module)
        if there is None:
            print(f"{package}: not installed", flush=True)
        else:
            sides[f"{package} {there}"] = python, peer
    for task in args.tasks:
        seconds = {name: [] for name in sides}
        for _ in range(args.turns):
            for name, (python, adapter) in sides.items():
                seconds[name] += run(python, adapter, task, args.rounds)
        mine = 1e3 * median(seconds["fedmpi"])
        for name in list(sides)[1:]:
            print_result(f"{task}, a round", ("fedmpi", mine), (name, 1e3 * median(seconds[name])), unit="ms", digits=1)


if __name__ == "__main__":
    main()
