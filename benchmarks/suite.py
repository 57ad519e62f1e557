"""Run all benchmarks or some of them.

    python benchmarks/suite.py [PART ...] [--results benchmarks/results]

Runs the programs of this folder with quick defaults, one after another; the machine should do nothing else. The output
of each part is written to results/PART.json with command, machine, versions and date. If a part fails, its previous
results are kept, the other parts are run, and the exit code is 1. To update the page of the results:
    python docs/make_performance.py > docs/performance.md
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from measure import HERE, describe_machine, mpirun_command

RESULTS = HERE / "results"


class Part:
    """A part of the suite: its title, and its commands.

    A command is the text after `python benchmarks/`, or (number of ranks, text) to run it under mpirun.
    """

    def __init__(self, title, *commands):
        self.title, self.commands = title, commands


CNN = (
    "cnn.py --threads 2",
    "cnn.py --threads 2 --precision bf16",
    (3, "cnn.py --threads 1 --hand 2"),
    "cnn.py --threads 2 --apart 2",
)
PARTS = {
    "cnn": Part("W1: 100 clients, 10 per round, a CNN of 1.66 M parameters", *CNN),
    "vectors": Part("W2: a vector of 25.6 M parameters, 8 clients", "vectors.py", (3, "vectors.py")),
    "rules": Part("W3: the server's rules", "rules.py"),
    "collectives": Part("W4: collectives", "collectives.py"),
    "scaling": Part("W5: scaling", "scaling.py"),
    "states": Part("W6: 10,000 clients that keep state", "states.py"),
    "many_clients": Part("1,000,000 clients compared with 100", "many_clients.py"),
    "small": Part("W7: small models, 1,000 clients", "small.py"),
    "exchange": Part("W8: exchange of a large model", "exchange.py"),
    "startup": Part("Start-up: from the command to the first step", "startup.py"),
    "checkpoint": Part("A checkpoint in every other round", "checkpoint.py --pairs 5"),
    "augment": Part("An epoch of augmented images", "augment.py"),
    "secagg": Part(
        "Secure aggregation", "secagg.py phases", "secagg.py round --threads 2", (3, "secagg.py round --threads 1")
    ),
    "peers": Part("Comparison with other programs", "peers.py"),
}


def split(command):
    """Split a command into the number of ranks, the program's file and its arguments."""
    ranks, text = command if isinstance(command, tuple) else (1, command)
    name, *words = shlex.split(text)
    return ranks, HERE / name, words


def command_words(command):
    """Return the words of a command, with mpirun if it needs several ranks."""
    ranks, file, words = split(command)
    return mpirun_command(ranks, file, *words) if ranks > 1 else [sys.executable, "-W", "ignore", str(file), *words]


def command_text(command):
    """Return a command as a user would type it."""
    ranks, file, words = split(command)
    start = f"mpirun -n {ranks} " if ranks > 1 else ""
    return f"{start}{shlex.join(['python', f'benchmarks/{file.name}', *words])}"


def run(command):
    """Run a command and show its output; return the exit code, the printed lines and the seconds."""
    began, lines = time.perf_counter(), []
    with subprocess.Popen(command_words(command), stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            print(text, end="", flush=True)
            lines.append(text.rstrip())
    return process.returncode, lines, round(time.perf_counter() - began, 1)


def measure(name, results):
    """Run a part and write its results; return whether all its commands succeeded."""
    found = {"part": name, "machine": describe_machine(), "commands": []}
    for command in PARTS[name].commands:
        print(f"== {name}: {command_text(command)}", flush=True)
        code, lines, seconds = run(command)
        print(f"   {seconds} s", flush=True)
        if code:
            print(f"{command_text(command)} ended with exit code {code}", file=sys.stderr)
            return False
        found["commands"].append({"command": command_text(command), "seconds": seconds, "lines": lines})
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return True


def main():
    """Run the benchmark with the arguments of the command line."""
    there = {name: part for name, part in PARTS.items() if split(part.commands[0])[1].exists()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(there)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    unknown = [name for name in args.parts if name not in there]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(there)}")
    failed = [name for name in args.parts or there if not measure(name, args.results)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
