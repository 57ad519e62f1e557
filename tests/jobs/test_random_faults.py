"""Random faults under real launchers: no process remains, no round is lost, and the results are those without faults.

A fault is drawn from its number: launcher, back end, whether the job continues without a lost rank, what happens to
which rank or to the launcher, and when. Afterwards the run is resumed in one process, and its hashes are compared with
those of an undisturbed run, or, if the job continued without ranks, with those of its replay. A few faults are in the
default suite; `make test-soak` draws FEDMPI_FAULTS of them.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from real_job import CONFIG, Job, hashes

from fedmpi import config
from fedmpi.runtime.code_trust import load_replay_settings
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs import replay
from fedmpi.runtime.record.atomic_files import read_tensors

STARTS = (  # launcher, back end, faults.on_lost_rank
    ("mpirun", "gloo", "abort"),
    ("mpirun", "mpi", "abort"),
    ("torchrun", "gloo", "abort"),
    ("ulfm", "gloo", "drop"),
    ("ulfm", "gloo", "redo"),
)
FAULTS = ("KILL", "TERM", "INT", "USR1", "TERM twice", "STOP", "STOP, CONT", "launcher KILL", "launcher INT")
MOMENTS = ("start", "import", "training", "training", "end")
FEW, MANY = 3, int(os.environ.get("FEDMPI_FAULTS", 60))
# An interrupt while Python itself starts, before it has read a line of fedmpi, is Python's to report.
STARTING = re.compile(r"Traceback(?:(?!fedmpi/|Traceback).)*?KeyboardInterrupt\n", re.S)
ORPHANS_S = 300  # after the fault, or a moment after the launcher's own end
ENDED_S = 600  # after the fault: imports, time-outs, the 30 s that torchrun gives a rank that does not answer
REQUESTS = ("TERM", "INT", "USR1", "TERM twice")
FURTHER = 3  # rounds that a job does after a fault that does not end it


def wait_until(limit_s, true):
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if true():
            return True
        time.sleep(0.05)
    return False


def check_run_files(run):
    """Check that lines and files are complete and rounds have no gap; return the number of recorded rounds."""
    rounds = []
    for path in run.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            text = path.read_text()
            assert text.endswith("\n") or not text
            rows = [json.loads(line) for line in text.splitlines()]
            if path.name == "metrics.jsonl":
                rounds = [row["round"] for row in rows]
                assert rounds == list(range(len(rounds)))
        elif path.suffix == ".yaml":
            yaml.safe_load(path.read_text())
        elif path.suffix == ".safetensors" and path.parent != run:
            read_tensors(path)
    return len(rounds)


def run_in_this_process(file, **changes):
    """Run a config file in this process, and return the run directory."""
    overrides = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()]
    result, code = execute_run(config.load(file, overrides))
    assert code == 0
    return Path(result["directory"])


class UndisturbedRun:
    """The hashes of a run without faults, for any number of rounds."""

    def __init__(self, folder):
        self.file, self.found = folder / "quiet.yaml", []
        self.file.write_text(yaml.safe_dump({**CONFIG, "name": "quiet", "output": str(folder)}))

    def __call__(self, rounds):
        if len(self.found) < rounds:
            self.found = hashes(run_in_this_process(self.file, rounds=rounds + 50, checkpoint__resume="auto"))
        return self.found[:rounds]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return UndisturbedRun(tmp_path_factory.mktemp("undisturbed"))


def resume_and_compare(job, undisturbed, label):
    """Resume the run for two more rounds, and check its hashes."""
    run = job.folder / "run"
    told = check_run_files(run)
    if told or (run / "identity.json").exists():
        shutil.rmtree(run / "ranks", ignore_errors=True)
        log = run / "log.txt"
        before = len(log.read_text()) if log.exists() else 0
        faults = {"on_lost_rank": "abort"}  # it is alone now
        found = run_in_this_process(job.folder / "run.yaml", rounds=told + 2, checkpoint__resume="auto", faults=faults)
        assert found == run, f"{label}: {found}"
        after = re.search(r"resuming after round (\d+)", log.read_text()[before:])
        reached = int(after[1]) + 1 if after else 0
        assert reached >= told - 1, f"{label}: {told} rounds were told, {reached} were there to go on from"
    else:
        run = run_in_this_process(job.folder / "run.yaml", rounds=2, checkpoint__resume="auto")
    if (run / "faults.jsonl").exists():
        settings = load_replay_settings(run, False)
        said, same = replay.compare_hashes(run, Path(execute_run(settings)[0]["directory"]))
        assert same, f"{label}: {said}: {(run / 'faults.jsonl').read_text()}"
    else:
        found = hashes(run)
        assert found == undisturbed(len(found)), f"{label}: other bits than without the fault"


def inflict(job, fault, rank):
    """Carry out a fault; return the time at which it happened, or None if the process had already ended."""
    who, _, how = fault.partition(" ") if fault.startswith("launcher") else ("rank", "", fault)
    pid = job.process.pid if who == "launcher" else job.find_rank(rank)
    struck = time.monotonic()
    if pid is None or job.process.poll() is not None:
        return None
    try:
        for name in how.replace("TERM twice", "TERM, TERM").split(", "):
            os.kill(pid, getattr(signal, f"SIG{name}"))
            time.sleep(1.0 if name == "STOP" and "," in how else 0.1 if "," in how else 0)
    except ProcessLookupError:
        return None
    return struck


def run_with_fault(folder, number, undisturbed):
    """Run a job with one fault, and check the result."""
    rng = random.Random(number)
    (kind, backend, policy), fault, moment = rng.choice(STARTS), rng.choice(FAULTS), rng.choice(MOMENTS)
    if kind == "ulfm" and moment in ("start", "import"):
        moment = "training"  # before the ranks have met mpirun --with-ft ends nobody (docs/reliability.md)
    rank, rounds, delay_s = rng.randrange(3), 30 if moment == "end" else 100_000, rng.random()
    comm = {"backend": backend, "start_timeout_s": 20, "round_timeout_s": 6 if policy == "abort" else 60}
    faults = {"on_lost_rank": policy}
    label = f"fault {number}: {fault} of rank {rank} at {moment} + {delay_s:.2f} under {kind}, {backend}, {policy}"
    job = Job(folder, kind, 3, comm=comm, rounds=rounds, faults=faults)
    try:
        found = wait_until(600, lambda: job.find_rank(rank) or job.process.poll() is not None)
        assert found, f"{label}: it did not start: {job.text()}"
        if moment == "import":
            delay_s *= 6
        if moment in ("training", "end"):
            due = 2 if moment == "training" else rounds - 3
            wait_until(600, lambda: len(job.rows()) >= due or job.process.poll() is not None)
        time.sleep(delay_s / 4 if moment == "start" else delay_s)
        struck, before = inflict(job, fault, rank), len(job.rows())
        began = time.monotonic() if struck is None else struck
        # Nothing ends a job that a rank has only paused in, nor one that does without: it is asked to stop, later.
        goes_on = fault == "STOP, CONT" or (policy != "abort" and fault in ("KILL", "STOP") and rank)
        asked = False
        if goes_on:
            wait_until(ENDED_S, lambda: job.process.poll() is not None or len(job.rows()) >= before + FURTHER)
            asked = job.process.poll() is None
            if asked:
                os.kill(job.rank(0), signal.SIGUSR1)
        ended = wait_until(ENDED_S, lambda: job.process.poll() is not None)
        if not ended and fault == "STOP" and (job.folder / "run" / "summary.json").exists():
            # It was frozen on its way out, with all written and no other rank left to notice it: mpirun waits for it.
            os.kill(job.find_rank(rank), signal.SIGCONT)
            ended = wait_until(ENDED_S, lambda: job.process.poll() is not None)
        assert ended, f"{label}: goes on: {job.ranks_output()}"
        left_s = max(ORPHANS_S - (time.monotonic() - began), 5)
        gone = wait_until(left_s, lambda: not job.alive())
        assert gone, f"{label}: {job.alive()} are left: {job.ranks_output()}"
        seconds, code, run = time.monotonic() - began, job.process.returncode, job.folder / "run"
        said = STARTING.sub("", job.ranks_output())
        for word in ("Traceback", "defect"):
            assert word not in said, f"{label}: {said}"
        summary = run / "summary.json"
        done = json.loads(summary.read_text())["exit_reason"] if summary.exists() else None
        assert code or done, f"{label}: exit code 0: {job.ranks_output()}"
        trained = moment in ("training", "end") and struck is not None
        if trained and (asked or fault in REQUESTS):
            assert code in (0, 1 if kind == "torchrun" else 75), f"{label}: exit code {code}: {job.ranks_output()}"
            assert done in ("finished", "stopped") or done.startswith("signal "), (
                f"{label}: {done}: {job.ranks_output()}"
            )
        if run.exists():
            resume_and_compare(job, undisturbed, label)
        facts = {"fault": fault, "moment": moment, "kind": kind, "backend": backend, "policy": policy, "rank": rank}
        return {"number": number, **facts, "code": code, "seconds": round(seconds, 1), "asked": asked, "reason": done}
    finally:
        job.kill()


@pytest.mark.parametrize("number", range(FEW))
def test_a_job_survives_a_random_fault(tmp_path, number, undisturbed):
    run_with_fault(tmp_path / "job", number, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(FEW, FEW + MANY))
def test_a_job_survives_many_random_faults(tmp_path, number, undisturbed):
    facts = run_with_fault(tmp_path / "job", number, undisturbed)
    if "FEDMPI_FAULTS_LOG" in os.environ:
        with Path(os.environ["FEDMPI_FAULTS_LOG"]).open("a") as log:
            log.write(f"{json.dumps(facts)}\n")
