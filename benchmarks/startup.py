"""Measure the time of a run until its first local step, and until its end.

    python benchmarks/startup.py [--ranks 5]

`fedmpi run configs/quickstart.yaml rounds=1`, in one process and under mpirun, is compared with a process that imports
torch and reads the same file of digits. They run in turn, each in new processes, with compiled bytecode. Results are
medians of processor seconds (the mean of the ranks that train) and of wall seconds. If there are fewer cores than
ranks, the ranks wait for each other during imports: on two cores five ranks take at least 2.5 times as long as one. The
process that only imports torch and reads the file, started on as many ranks by the same mpirun, shows this effect.
"""

import argparse
import compileall
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[1]
REPORT = "FEDMPI_FIRST_STEP"  # environment variable: the file to which each process writes its times
BY_HAND = """
import runpy, sys
import numpy, torch
table = numpy.loadtxt(sys.argv[1], delimiter=",")
x, y = torch.from_numpy(table[:, :-1]).float(), torch.from_numpy(table[:, -1]).long()
runpy.run_path(sys.argv[2])["record_time"]("step")
"""
RUN = ["run", "configs/quickstart.yaml", "rounds=1", f"model={{name: {__file__}:make_net}}"]


def record_time(what):
    """Append the processor seconds and the current time of this process to the file of results."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    line = json.dumps({"what": what, "cpu": used.ru_utime + used.ru_stime, "wall": time.time()})
    with open(os.environ[REPORT], "a") as file:
        file.write(f"{line}\n")


def make_net(input_shape, classes):
    """Return quickstart's model, with a hook that reports the time of its first forward pass in training."""
    import torch

    from fedmpi.models.cnns import mcmahan_cnn

    module = mcmahan_cnn(input_shape, classes)

    def first(module, inputs):
        if module.training and torch.is_grad_enabled():
            handle.remove()
            record_time("step")

    handle = module.register_forward_pre_hook(first)
    return module


def measure(command, folder):
    """Run a command and return its processor seconds and wall seconds "to the first step" and "to the end".

    Processor seconds are a mean over the ranks that train in the first case, and a sum over processes in the second.
    """
    file = folder / "report"
    file.unlink(missing_ok=True)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    result = subprocess.run(command, cwd=ROOT, env=env | {REPORT: str(file)}, capture_output=True, text=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.time() - began
    if result.returncode:
        raise SystemExit(result.stderr)
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    in_all = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "to the first step": (mean(s["cpu"] for s in steps), max(s["wall"] for s in steps) - began),
        "to the end": (in_all, wall),
    }


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=5, help="under mpirun; 1: leave it out")
    args = parser.parse_args()
    import sklearn

    digits = Path(sklearn.__file__).parent / "datasets/data/digits.csv.gz"
    compileall.compile_dir(ROOT / "fedmpi", quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        run = [shutil.which("fedmpi"), *RUN, f"output={folder}"]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", *root, "-n", str(args.ranks)]
        by_hand = [sys.executable, "-c", BY_HAND, str(digits), __file__]
        commands = {"import torch, read": by_hand, "fedmpi, one process": run}
        if args.ranks > 1:
            commands |= {
                f"import, {args.ranks} ranks": [*mpirun, *by_hand],
                f"fedmpi, {args.ranks} ranks": [*mpirun, *run],
            }
        results = {name: [] for name in commands}
        for _ in range(args.repeats):
            for name, command in commands.items():
                results[name].append(measure(command, Path(folder)))
    hand, *ours = results
    for until in ("to the first step", "to the end"):
        print(until)
        base = [median(each["to the first step"][i] for each in results[hand]) for i in (0, 1)]
        print(f"    {hand:20} processor {base[0]:.2f} s         wall {base[1]:.2f} s")
        for name in ours:
            cpu, wall = (median(each[until][i] for each in results[name]) for i in (0, 1))
            ratios = cpu / base[0], wall / base[1]
            print(f"    {name:20} processor {cpu:.2f} s {ratios[0]:5.2f} x wall {wall:.2f} s {ratios[1]:5.2f} x")


if __name__ == "__main__":
    main()
