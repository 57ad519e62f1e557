"""Measure the cost of a rank failure.

    python benchmarks/lost_ranks.py [--ranks 8] [--kills 5] [--every 20]

Runs a small experiment under `mpirun --with-ft ulfm` (Open MPI 5) twice: undisturbed, and with a random rank killed
every --every seconds. Prints for each kill the seconds until the other ranks continue the round (a new line in
faults.jsonl) and until the next round is finished, and the throughput kept: rounds per second with rank failures,
divided by that of the undisturbed run. Then replays the run, and compares the hashes of every round.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import yaml

SETTINGS = {
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 24, "alpha": 0.5}},
    "model": {"name": "mlp"},
    "method": {"name": "scaffold"},
    "train": {"epochs": 4, "batch_size": 10, "momentum": 0},
    "rounds": 100_000,
}


class Job:
    """A run under mpirun whose ranks can be killed."""

    def __init__(self, folder, name, backend, policy, ranks):
        self.run = folder / name
        settings = {**SETTINGS, "output": str(folder), "name": name, "comm": {"backend": backend}}
        self.file = folder / f"{name}.yaml"
        self.file.write_text(yaml.safe_dump({**settings, "faults": {"on_lost_rank": policy}}))
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *root, "--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm", "-n", str(ranks)]
        command += ["fedmpi", "run", str(self.file)]
        self.log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def rank(self, number):
        """Return the process id of a rank."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                mine = str(self.file) in (path / "cmdline").read_text()
                if mine and f"OMPI_COMM_WORLD_RANK={number}" in (path / "environ").read_text().split("\0"):
                    return int(path.name)
            except OSError:
                continue
        raise SystemExit(f"no rank {number}; see {self.log.name}")

    def rounds(self):
        file = self.run / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0

    def until(self, true, limit_s=120):
        began = time.time()
        while not true():
            if self.process.poll() is not None or time.time() > began + limit_s:
                raise SystemExit(f"it ended, or does not go on; see {self.log.name}")
            time.sleep(0.005)
        return time.time()

    def stop(self):
        os.kill(self.rank(0), signal.SIGUSR1)
        self.process.wait(60)


def count_rank_failures(job):
    """Return the number of rank failures that the run has recorded."""
    file = job.run / "faults.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def lost_time_fraction(job):
    """Return the additional time of rounds with a rank failure, as a fraction of the time of all rounds.

    It is the time beyond the median of the ten rounds before and the ten rounds after each of them.
    """
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    seconds = {line["round"]: line["wall_s"] for line in lines}
    lost = {json.loads(line)["round"] for line in (job.run / "faults.jsonl").read_text().splitlines()}
    usual = {
        r: statistics.median([seconds[k] for k in range(r - 10, r + 11) if k in seconds and k not in lost])
        for r in lost
    }
    return sum(seconds[r] - usual[r] for r in lost if r in seconds) / sum(seconds.values())


def measure(folder, backend, policy, ranks, kills, every_s, seed, quiet_s):
    """Run a job undisturbed and a job whose ranks are killed, and print the comparison."""
    rng, alive = random.Random(seed), list(range(1, ranks))
    seconds = kills * every_s
    quiet = Job(folder, f"quiet-{backend}-{policy}", backend, policy, ranks)
    quiet.until(lambda: quiet.rounds() >= 3)
    began, before = time.time(), quiet.rounds()
    time.sleep(quiet_s or seconds)
    undisturbed = (quiet.rounds() - before) / (time.time() - began)
    quiet.stop()

    job = Job(folder, f"lossy-{backend}-{policy}", backend, policy, ranks)
    job.until(lambda: job.rounds() >= 3)
    began, before, waits, closed = time.time(), job.rounds(), [], []
    for number in range(kills):
        time.sleep(max(0.0, began + (number + rng.random()) * every_s - time.time()))
        rank = alive.pop(rng.randrange(len(alive)))
        pid = job.rank(rank)
        death = time.time()
        os.kill(pid, signal.SIGKILL)
        waits.append(job.until(lambda due=number + 1: count_rank_failures(job) >= due) - death)
        result = job.rounds()
        closed.append(job.until(lambda result=result: job.rounds() > result) - death)
    time.sleep(max(0.0, began + seconds - time.time()))
    lossy = (job.rounds() - before) / (time.time() - began)
    job.stop()
    replay = subprocess.run(["fedmpi", "replay", str(job.run)], capture_output=True, text=True)
    return {
        "backend": backend, "policy": policy, "ranks": ranks, "kills": kills, "every_s": every_s,
        "going_on_s": [round(x, 2) for x in waits], "next_line_s": [round(x, 2) for x in closed],
        "median_s": round(statistics.median(waits), 2), "rounds_a_second": [round(undisturbed, 2), round(lossy, 2)],
        "kept": round(lossy / undisturbed, 3), "time_kept": round(1 - lost_time_fraction(job), 4),
        "replay": replay.stdout.strip().splitlines()[-1:],
    }  # fmt: skip


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds undisturbed; as long as the other by default")
    parser.add_argument("--backends", nargs="+", default=["gloo"])
    parser.add_argument("--policies", nargs="+", default=["drop", "redo"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for backend in arguments.backends:
            for policy in arguments.policies:
                case = backend, policy, arguments.ranks, arguments.kills, arguments.every
                print(json.dumps(measure(Path(folder), *case, arguments.seed, arguments.quiet)), flush=True)


if __name__ == "__main__":
    main()
