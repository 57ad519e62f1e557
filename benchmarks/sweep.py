"""Compare `fedmpi sweep` with a loop over `fedmpi run`, for the quickstart.

    python benchmarks/sweep.py [--runs 30]

Each run has its own seed. Both sides run in turn, a part of the runs at a time; results are wall and processor seconds,
and whether the hashes agree.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import measure

ROOT = Path(__file__).parents[1]
FILE = "base: [{base}]\nname: {name}\noutput: {output}\nreport: false\ngrid: {{seed: {seeds}}}\n"


def measure_commands(commands, folder):
    """Run commands one after another; return their wall seconds and processor seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        result = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(result.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read_hashes(run):
    """Return the hashes of the global model after each round of a run."""
    return [json.loads(line)["sha256"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--parts", type=int, default=3, help="each side takes so many turns")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    fedmpi, base = shutil.which("fedmpi"), ROOT / "configs" / "quickstart.yaml"
    results = {"sweep": [], "loop": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for part in range(args.parts):
            seeds = list(range(part, args.runs, args.parts))
            file = folder / f"part{part}.yaml"
            file.write_text(FILE.format(base=base, name=f"part{part}", output=folder, seeds=seeds))
            loop = [
                [fedmpi, "run", base, f"output={folder}", f"name=loop{seed}", f"seed={seed}", "report=false"]
                for seed in seeds
            ]
            sides = {"sweep": [[fedmpi, "sweep", file]], "loop": loop}
            for name in ("sweep", "loop") if part % 2 else ("loop", "sweep"):
                commands = [[*command, f"rounds={args.rounds}"] for command in sides[name]]
                results[name].append(measure_commands(commands, folder))
        for seed in range(args.runs):
            ours = read_hashes(folder / f"part{seed % args.parts}" / f"seed-{seed}")
            if ours != read_hashes(folder / f"loop{seed}"):
                raise SystemExit(f"seed {seed}: the hashes differ")
    cores = len(os.sched_getaffinity(0))
    for at, what in enumerate(("wall", "processor")):
        ours, theirs = (sum(pair[at] for pair in results[name]) for name in ("sweep", "loop"))
        note = f"{args.runs} runs, {cores} cores, same hashes"
        measure.print_result(f"runs of the quickstart, {what}", ("sweep", ours), ("loop", theirs), note=note, digits=1)


if __name__ == "__main__":
    main()
