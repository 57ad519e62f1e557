"""Being told to stop leaves a readable result; a rank that dies ends the job. Nobody hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, clean_env, launcher, warm
from safetensors.torch import load_file

AGAIN = 75  # the run can be gone on with
CONFIG = {
    "name": "run",
    "rounds": 100_000,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 6}},
    "model": {"name": "mlp"},
    "method": {"name": "scaffold"},
    "evaluate": {"protocol": ["global", "personal"]},
}


class Job:
    """A run that would take hours, in the middle of it. cold: it imports what it needs (fork_server.py)."""

    words = ("fedmpi", "run")

    def __init__(self, folder, kind, size, cold=True, **changes):
        self.folder = folder
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(folder), **changes}))
        command = [*self.command(kind, size), *self.words, str(folder / "run.yaml")]
        self.log = (folder / "out").open("w")
        # A session of its own: what a terminal's Ctrl-C reaches is the launcher and whoever shares its group.
        self.process = subprocess.Popen(
            command,
            env=clean_env() if cold else warm(),
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def command(self, kind, size):
        return launcher(kind, size)

    def wait_for_rounds(self, n):
        self.wait_for(lambda: len(self.rows()) >= n)

    def wait_for(self, true):
        began = time.monotonic()
        while not true():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() - began < 120, self.text()
            time.sleep(0.05)

    def rows(self):
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_text().splitlines() if file.exists() else []

    def text(self):
        return (self.folder / "out").read_text()

    def rank(self, number, or_none=False):
        """The process of a rank, by what its launcher told it."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                mine = str(self.folder / "run.yaml") in (path / "cmdline").read_text()
                told = (path / "environ").read_text().split("\0")
            except OSError:
                continue
            if mine and (f"OMPI_COMM_WORLD_RANK={number}" in told or f"RANK={number}" in told):
                return int(path.name)
        if or_none:
            return None
        raise AssertionError(f"no rank {number}: {self.text()}")

    def alive(self):
        """The processes of this job that are left."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder / "run.yaml") in path.read_text():
                    found.append(int(path.parent.name))
        return found

    def ends_within(self, limit_s):
        """The exit code; no process of the job outlives it."""
        began = time.monotonic()
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s: {self.text()}") from None
        while self.alive() and time.monotonic() < began + limit_s:
            time.sleep(0.1)
        assert not self.alive()
        return code

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.log.close()


class Faulty(Job):
    """`Job`, with what its ranks say apart from what torchrun says, which prints a traceback of its own."""

    def command(self, kind, size):
        first, *rest = super().command(kind, size)
        apart = ["--redirects", "3", "--log-dir", str(self.folder / "ranks")] if kind == "torchrun" else []
        return [first, *apart, *rest]

    def said(self):
        logs = sorted((self.folder / "ranks").rglob("*.log"))
        texts = [path.read_text(errors="replace") for path in (logs or [self.folder / "out"])]
        return "".join(texts)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(kind="alone", size=1, made=Job, **changes):
        jobs.append(made(tmp_path / f"job{len(jobs)}", kind, size, **changes))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def whole(job, number):
    """The run directory of a run that was stopped by a signal; None: by one that rank 0 did not hear itself."""
    run = job.folder / "run"
    rows = [json.loads(line) for line in job.rows()]
    assert [row["round"] for row in rows] == list(range(len(rows)))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == len(rows)
    assert summary["exit_reason"] == ("stopped" if number is None else f"signal {int(number)}")
    assert all(bool(x.isfinite().all()) for x in load_file(run / "model.safetensors").values())
    assert not list(run.glob(".*.tmp"))
    assert "Traceback" not in job.text()
    assert "defect" not in job.text()
    return rows


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_alone(start, number):
    job = start()
    job.wait_for_rounds(2)
    os.killpg(job.process.pid, number)
    assert job.ends_within(10) == AGAIN
    assert len(whole(job, number)) >= 2
    assert f"stopped early (signal {int(number)})" in job.text()


STUCK = """
import time
from pathlib import Path
from torch import nn

class Stuck(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        if self.training:
            Path("MARK").touch()
            time.sleep(100)
        return self.head(x.flatten(1))

def stuck(input_shape, classes):
    return Stuck(64, classes)
"""


@contextlib.contextmanager
def inherited(number, handler):
    """What a process that is started meanwhile does with a signal; the suite itself may be under nohup."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_sighup_is_a_request_to_stop(start):
    with inherited(signal.SIGHUP, signal.SIG_DFL):
        job = start()
    job.wait_for_rounds(2)
    os.kill(job.process.pid, signal.SIGHUP)
    assert job.ends_within(10) == AGAIN
    assert len(whole(job, signal.SIGHUP)) >= 2


def test_nohup_goes_on(start):
    with inherited(signal.SIGHUP, signal.SIG_IGN):
        job = start()
    job.wait_for_rounds(2)
    os.kill(job.process.pid, signal.SIGHUP)
    job.wait_for_rounds(len(job.rows()) + 2)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.ends_within(10) == AGAIN


def test_a_second_signal_ends_the_process_at_once(start, tmp_path):
    """The first is heard after the batch, and this batch takes 100 s."""
    mark = tmp_path / "mark"
    (tmp_path / "stuck.py").write_text(STUCK.replace("MARK", str(mark)))
    job = start(model={"name": f"{tmp_path / 'stuck.py'}:stuck"})
    for _ in range(600):
        if mark.exists():
            break
        time.sleep(0.05)
    os.kill(job.process.pid, signal.SIGINT)
    time.sleep(1)
    assert job.process.poll() is None
    os.kill(job.process.pid, signal.SIGINT)
    assert job.ends_within(3) == 128 + signal.SIGINT


def test_ctrl_c_under_mpirun(start):
    """mpirun turns it into SIGTERM and, Open MPI 5, a quarter of a second later into SIGKILL: time enough for this
    model on a machine that is not too busy, hence three attempts."""
    for _ in range(3):
        job = start("mpirun", 3)
        job.wait_for_rounds(2)
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.ends_within(10) != 0
        assert "Traceback" not in job.text()
        if (job.folder / "run" / "summary.json").exists():
            break
    assert len(whole(job, signal.SIGTERM)) >= 2


def test_a_signal_that_mpirun_hands_on(start):
    """SIGUSR1, as Slurm sends it before the time is up: every rank hears it, and all leave together."""
    job = start("mpirun", 3, cold=False)
    job.wait_for_rounds(2)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.ends_within(10) == AGAIN
    assert len(whole(job, signal.SIGUSR1)) >= 2


def test_one_rank_is_told_and_all_stop(start):
    """Its upload says so, the round is abandoned, rank 0 tells the others; nobody is left waiting."""
    job = start("mpirun", 3, cold=False)
    job.wait_for_rounds(2)
    os.kill(job.rank(2), signal.SIGTERM)
    assert job.ends_within(10) == AGAIN
    assert len(whole(job, None)) >= 2


class Scripted(Job):
    """Started by the script of launch/."""

    def command(self, kind, size):
        launcher(kind, size)  # or skip
        return [str(ROOT / "launch" / f"{kind}.sh"), str(size)]

    words = ()  # the script says `fedmpi run` itself


@pytest.mark.parametrize("kind", ["mpirun", "torchrun"])
def test_the_script_of_a_launcher_is_told(start, kind):
    """The ranks write what they have and close their round, and the script ends as rank 0 does."""
    job = start(kind, 3, Scripted, cold=False)
    job.wait_for_rounds(2)
    job.process.terminate()
    assert job.ends_within(30) == AGAIN, job.text()
    assert len(whole(job, signal.SIGUSR1)) >= 2
    checkpoints = sorted((job.folder / "run" / "checkpoints").iterdir())
    assert checkpoints[-1].name == f"{len(job.rows()) - 1:06}.safetensors"


@pytest.mark.parametrize("after_s", [0.0, 0.2, 1.0, 2.5])
def test_the_script_of_a_launcher_is_told_in_the_start(start, after_s):
    """Before the launcher listens, before the ranks do, while they import and meet."""
    job = start("mpirun", 2, Scripted)
    time.sleep(0.3 + after_s)  # until the shell has begun
    job.process.terminate()
    assert job.ends_within(60) == AGAIN, job.text()
    assert "Traceback" not in job.text()


@pytest.mark.parametrize(("kind", "size"), [("alone", 1), ("mpirun", 2)])
def test_one_rank_is_told_in_the_start(start, kind, size):
    job = start(kind, size)
    while (pid := job.rank(size - 1, or_none=True) if size > 1 else job.process.pid) is None:
        time.sleep(0.02)
    time.sleep(0.5)  # Python itself has begun, torch has not
    os.kill(pid, signal.SIGTERM)
    assert job.ends_within(60) == AGAIN, job.text()
    whole(job, None if size > 1 else signal.SIGTERM)


def test_who_is_told_while_the_others_do_not_come_leaves_soon(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(tmp_path)}))
    code = "import sys; sys.argv = ['fedmpi', 'run', sys.argv[1]]; from fedmpi.common import signals; "
    code += "signals.START_S = 1; from fedmpi.cli import main; main()"
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    env = clean_env(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", **told)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run.yaml")], env=env, cwd=ROOT)
    time.sleep(1)
    process.terminate()
    assert process.wait(60) == AGAIN  # far less than the 300 s of comm.start_timeout_s


@pytest.mark.parametrize(("kind", "backend"), [("mpirun", "mpi"), ("torchrun", "gloo")])
def test_a_killed_rank_ends_the_job(start, kind, backend):
    job = start(kind, 3, comm={"backend": backend}, cold=False)
    job.wait_for_rounds(2)
    os.kill(job.rank(2), signal.SIGKILL)
    assert job.ends_within(30) != 0
    assert all(json.loads(line)["round"] == i for i, line in enumerate(job.rows()))
