"""Random faults under real launchers: nobody is left behind, nobody sees a traceback, what is on disk can be read.

A fault is drawn from its number: who starts the job, over what it talks, what happens to which rank or to the
launcher, and when. Six of them in the default suite; `pytest -m slow` draws FEDMPI_FAULTS of them, 60 by default.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from test_signals import Faulty

STARTS = (("mpirun", "gloo"), ("mpirun", "mpi"), ("torchrun", "gloo"))
FAULTS = ("KILL", "TERM", "INT", "STOP", "launcher")
MOMENTS = ("start", "import", "training", "end")
FEW, MANY = 6, int(os.environ.get("FEDMPI_FAULTS", 60))
# An interrupt while Python itself starts, before it has read a line of fedmpi, is Python's to report.
STARTING = re.compile(r"Traceback(?:(?!fedmpi/|Traceback).)*?KeyboardInterrupt\n", re.S)
ORPHANS_S = 60  # after the fault, or a moment after the launcher's own end
ENDED_S = (
    120  # after the fault: imports, the start's time-out, and 30 s that torchrun gives a rank that does not answer
)


def wait_until(limit_s, true):
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if true():
            return True
        time.sleep(0.05)
    return False


def readable(run):
    """Whole lines, whole files; rounds without a gap."""
    if not run.exists():
        return
    for path in run.glob("*.json"):
        json.loads(path.read_text())
    for path in run.glob("*.jsonl"):
        text = path.read_text()
        assert text.endswith("\n") or not text
        assert all(json.loads(line) for line in text.splitlines())
        if path.name == "metrics.jsonl":
            rounds = [json.loads(line)["round"] for line in text.splitlines()]
            assert rounds == list(range(len(rounds)))
    for path in run.glob("*.yaml"):
        yaml.safe_load(path.read_text())
    for path in run.glob("*.safetensors"):
        load_file(path)


def strike(folder, number):
    """One fault; what became of it, in a line."""
    rng = random.Random(number)
    (kind, backend), fault, moment, rank = (
        rng.choice(STARTS),
        rng.choice(FAULTS),
        rng.choice(MOMENTS),
        rng.randrange(3),
    )
    rounds, delay_s = 30 if moment == "end" else 100_000, rng.random()
    comm = {"backend": backend, "start_timeout_s": 15, "round_timeout_s": 6}
    job = Faulty(folder, kind, 3, comm=comm, rounds=rounds)
    label = f"fault {number}: {fault} of rank {rank} at {moment} + {delay_s:.2f} under {kind}, {backend}"
    try:
        found = wait_until(60, lambda: job.rank(rank, or_none=True) or job.process.poll() is not None)
        assert found, f"{label}: it did not start: {job.text()}"
        if moment == "import":
            delay_s *= 6
        if moment in ("training", "end"):
            due = 2 if moment == "training" else rounds - 3
            wait_until(90, lambda: len(job.rows()) >= due or job.process.poll() is not None)
        time.sleep(delay_s / 4 if moment == "start" else delay_s)
        pid = job.process.pid if fault == "launcher" else job.rank(rank, or_none=True)
        struck = time.monotonic()
        if pid is not None and job.process.poll() is None:
            os.kill(pid, signal.SIGKILL if fault == "launcher" else getattr(signal, f"SIG{fault}"))
        assert wait_until(ENDED_S, lambda: job.process.poll() is not None), f"{label}: goes on: {job.said()}"
        left_s = max(ORPHANS_S - (time.monotonic() - struck), 5)
        assert wait_until(left_s, lambda: not job.alive()), f"{label}: {job.alive()} are left: {job.said()}"
        seconds, code, run = time.monotonic() - struck, job.process.returncode, job.folder / "run"
        said = STARTING.sub("", job.said())
        for word in ("Traceback", "defect"):
            assert word not in said, f"{label}: {said}"
        readable(run)
        done = (run / "summary.json").exists() and json.loads((run / "summary.json").read_text())["exit_reason"]
        assert code or done, f"{label}: exit code 0: {job.said()}"
        return f"{label}: code {code} after {seconds:.1f} s; {done}\n{job.said()}"
    finally:
        job.end()


@pytest.mark.parametrize("number", range(FEW))
def test_a_few_faults(tmp_path, number):
    strike(tmp_path / "job", number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FEW, FEW + MANY))
def test_many_faults(tmp_path, number):
    said = strike(tmp_path / "job", number)
    if "FEDMPI_FAULTS_LOG" in os.environ:
        with Path(os.environ["FEDMPI_FAULTS_LOG"]).open("a") as log:
            log.write(f"{said}\n")
