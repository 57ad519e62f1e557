"""If a rank of a job fails, the job prints one message, on rank 0, which names the cause; then no process remains."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
import yaml
from helpers import BIN, ROOT, clean_env, launcher
from real_job import CONFIG, wait_until

PLUGIN = """
import ctypes, os, time
from pathlib import Path
import torch
from torch import nn

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", 0)))

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.steps = kind, 0
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        self.steps += self.training
        if RANK == 2 and self.steps > 100:
            if self.kind == "error":
                raise ValueError("the ninth wave")
            if self.kind == "memory":
                torch.empty(10**15)
            if self.kind == "single":
                x = x[:1]
            if self.kind == "crash":
                ctypes.string_at(0)
            if self.kind == "stuck":
                Path(__file__).with_name("stuck.mark").touch()
                time.sleep(1000)
        return self.head(self.norm(x))

def error(input_shape, classes): return Net("error")
def memory(input_shape, classes): return Net("memory")
def single(input_shape, classes): return Net("single")
def crash(input_shape, classes): return Net("crash")
def stuck(input_shape, classes): return Net("stuck")

def alone(input_shape, classes):
    if RANK == 2:
        raise ValueError("this one cannot be built here")
    return Net("")
"""
HOST = socket.gethostname()
GLOO, MPI, TORCHRUN = ("mpirun", "gloo"), ("mpirun", "mpi"), ("torchrun", "gloo")


@pytest.fixture
def start_job(start, tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)

    def start_job(how, model=None, cold=False, **changes):
        comm = {"backend": how[1], "start_timeout_s": 30, **changes.pop("comm", {})}
        if model:
            changes["model"] = {"name": f"{tmp_path}/plugin.py:{model}"}
        return start(how[0], 3, cold=cold, comm=comm, **changes)

    return start_job


def reason(job):
    return job.summary()["exit_reason"]


def test_a_rank_that_a_signal_ends_prints_its_stack(start_job):
    job = start_job(GLOO, "crash")
    assert job.wait()
    assert re.search(
        r'(?s)Fatal Python error: Segmentation fault.*plugin\.py", line \d+ in forward', job.ranks_output()
    )


CAUSES = {
    "error": r"forward at .*plugin\.py:\d+: ValueError: the ninth wave",
    "memory": r"out of memory \(.*lower train\.batch_size",
    "single": r"batch normalisation cannot be applied to a batch of one sample.*train\.drop_last: true",
}


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        pytest.param(GLOO, "error", marks=pytest.mark.smoke),
        (TORCHRUN, "memory"),
        (MPI, "single"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_failed_client_is_named_with_rank_and_round(start_job, how, cause):
    job = start_job(how, cause)
    code = job.wait()
    assert code == (1 if how is TORCHRUN else 2)  # torchrun has its own
    assert re.search(rf"^fedmpi \[rank 2 on .*\]: error: round \d+, client \d: .*{CAUSES[cause]}", job.only_message())
    assert re.search(r"^failed: \[rank 2 on .*\]: round \d+, client \d: ", reason(job))
    rounds = [row["round"] for row in job.rows()]
    assert rounds == list(range(len(rounds)))
    assert job.summary()["rounds"] == len(rounds)


def test_a_mistake_on_one_rank_before_the_ranks_connect_is_reported(start_job):
    """Rank 0 waits for that rank, and is told why it does not arrive."""
    job = start_job(TORCHRUN, "alone", comm={"start_timeout_s": 200})
    job.wait()
    assert re.search(r"^fedmpi \[rank 2 on .*\]: error: .*this one cannot be built here", job.only_message())


@pytest.mark.smoke
def test_a_killed_rank_is_named(start_job):
    job = start_job(TORCHRUN)
    job.wait_for_rounds(2)
    os.kill(job.rank(2), signal.SIGKILL)
    assert job.wait() != 0
    if "stopped early (signal 15)" in job.ranks_output():
        return  # torchrun, which looks ten times a second, has seen the dead rank first and told the others to stop
    assert f"rank 2 on {HOST} is dead" in job.only_message()
    assert reason(job) == f"failed: rank 2 on {HOST} is dead: its connection has ended"
    assert f"\nto resume: fedmpi resume {job.folder}/run\n" in job.ranks_output()


@pytest.mark.parametrize("how", [GLOO, pytest.param(MPI, marks=pytest.mark.smoke), TORCHRUN], ids="-".join)
def test_a_frozen_rank_is_named_and_ended(start_job, how):
    job = start_job(how, cold=True, comm={"round_timeout_s": 10})
    job.wait_for_rounds(2)
    frozen = job.rank(2)
    os.kill(frozen, signal.SIGSTOP)
    if how is TORCHRUN:  # which itself kills only 30 s later what does not end
        job.wait_for(lambda: job.find_rank(0) is None)
        os.kill(frozen, signal.SIGKILL)
    assert job.wait() != 0
    assert f"rank 2 on {HOST} is silent: no message from or to it for 10 s (comm.round_timeout_s)" in job.only_message()
    assert f"rank 2 on {HOST} is silent" in reason(job)


@pytest.mark.parametrize("how", [MPI, pytest.param(TORCHRUN, marks=pytest.mark.smoke)], ids="-".join)
def test_a_dead_launcher_ends_its_ranks(start_job, tmp_path, how):
    """Even a rank that is in the middle of a batch ends."""
    job = start_job(how, "stuck", cold=True)
    job.wait_for((tmp_path / "stuck.mark").exists)
    job.process.kill()
    wait_until(lambda: not job.alive(), job.ranks_output)
    if how is TORCHRUN:  # Open MPI ends ranks without a daemon by itself
        assert re.search(r"error: the launcher \(torchrun, process \d+\) has died", job.only_message())
        assert "the launcher" in reason(job)


# ---- one process: disk and streams ----
def config(tmp_path, **changes):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "name": "run", "output": str(tmp_path), "rounds": 3, **changes}))
    return file


def shell(words, env=None):
    command = f"PATH={BIN}:$PATH; {words}"
    return subprocess.run(["bash", "-c", command], env=env or clean_env(), capture_output=True, text=True, timeout=120)


@pytest.mark.smoke
def test_a_checkpoint_that_does_not_fit_on_the_disk_is_one_message(tmp_path):
    done = shell(f"ulimit -f 16; fedmpi run {shlex.quote(str(config(tmp_path, rounds=10_000)))}")
    assert done.returncode == 2
    assert re.fullmatch(
        r"fedmpi: error: (checkpoint|run directory): cannot write .*: File too large; .*\n", done.stderr
    )
    assert not list((tmp_path / "run").rglob(".*"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"].startswith("failed: ")


def test_a_run_resumes_after_its_disk_was_full(tmp_path):
    """A real disk of 3 MB is full in the middle of a checkpoint.

    Once there is space, the run resumes with the same bits.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        changes = {"model": {"name": "mlp"}, "rounds": 10_000}
        done = shell(f"fedmpi run {shlex.quote(str(config(tmp_path, **changes)))} output={disk}")
        assert done.returncode == 2
        assert re.fullmatch(r"fedmpi: error: .*: cannot write .*: No space left on device.*\n", done.stderr), (
            done.stderr
        )
        assert not list((disk / "run").rglob(".*"))
        told = len((disk / "run" / "metrics.jsonl").read_text().splitlines())
        subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
        done = shell(f"fedmpi resume {disk}/run rounds={told + 3}")
        assert done.returncode == 0, done.stderr
        found = [json.loads(line)["sha256"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert len(found) == told + 3
    assert shell(f"fedmpi run {shlex.quote(str(config(tmp_path, **changes | {'rounds': len(found)})))}").returncode == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["sha256"] for line in lines] == found


@pytest.mark.parametrize("to", ["> /dev/full", "<&- >&- 2>&-", "| head -1"])
def test_closed_or_full_streams_do_not_end_a_run(tmp_path, to):
    done = shell(f"set -o pipefail; fedmpi run {shlex.quote(str(config(tmp_path)))} {to}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "finished"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "run" / "log.txt").read_text().startswith("run: scaffold on digits")


INIT = """
import os, sys, time
from fedmpi.comm.backends import mpi
from fedmpi.comm.launchers import Job
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(1000)
mpi.initialize_mpi(Job("mpi", 0, 2, 0, 2, "here"), 2)
"""


def test_a_time_out_of_mpi_init_prints_one_line():
    command = [*launcher("mpirun", 2), sys.executable, "-c", INIT]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("fedmpi [rank 0 on here]: error: still in MPI_Init, which waits for all ranks") == 1
    assert "most recent call" not in done.stderr
