"""A run that is asked to stop leaves a readable result and exit code 75; a rank that dies ends the job."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml
from helpers import ROOT, clean_env
from real_job import CONFIG, RESUMABLE, inherited_handler, processes, wait_until
from safetensors.torch import load_file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], ids=lambda s: s.name)
def test_a_signal_stops_a_single_process(start, number):
    job = start()
    job.wait_for_rounds(2)
    os.killpg(job.process.pid, number)
    assert job.wait() == RESUMABLE
    job.assert_stopped(number)
    assert f"stopped early (signal {int(number)})" in job.text()
    assert all(bool(x.isfinite().all()) for x in load_file(job.run / "model.safetensors").values())


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
            time.sleep(1000)
        return self.head(x.flatten(1))

def stuck(input_shape, classes):
    return Stuck(64, classes)
"""


def test_a_run_under_nohup_ignores_hangup(start):
    job = start()
    job.wait_for_rounds(2)
    job.kill()
    with inherited_handler(signal.SIGHUP, signal.SIG_IGN):
        process = subprocess.Popen(
            [*job.command, str(job.folder / "run.yaml"), "name=ignores"],
            env=job.env,
            cwd=ROOT,
            stdout=job.log,
            stderr=job.log,
        )
    job.process, job.run = process, job.folder / "ignores"
    job.wait_for_rounds(2)
    os.kill(process.pid, signal.SIGHUP)
    job.wait_for_rounds(len(job.rows()) + 2)
    os.kill(process.pid, signal.SIGTERM)
    assert job.wait() == RESUMABLE
    job.assert_stopped(signal.SIGTERM)


def test_a_second_signal_ends_the_process_at_once(start, tmp_path):
    """The first signal takes effect after the batch, which takes 1000 s."""
    mark = tmp_path / "mark"
    (tmp_path / "stuck.py").write_text(STUCK.replace("MARK", str(mark)))
    job = start(model={"name": f"{tmp_path / 'stuck.py'}:stuck"})
    job.wait_for(mark.exists)
    os.kill(job.process.pid, signal.SIGINT)
    while job.process.poll() is None:  # signals that come within a second of each other count as one
        time.sleep(1.5)
        os.kill(job.process.pid, signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT


def test_a_signal_to_one_rank_stops_all_ranks(start):
    """Its upload contains the request, the round is abandoned, and rank 0 tells the others; no rank waits for ever."""
    job = start("mpirun", 3, cold=False)
    job.wait_for_rounds(2)
    os.kill(job.rank(2), signal.SIGTERM)
    assert job.wait() == RESUMABLE
    job.assert_stopped(None)


MOMENTS = {  # of the start of a job under mpirun -> the words of a process that is there from then on
    "launcher": ("mpirun\0-n\0",),
    "ranks": ("OMPI_COMM_WORLD_RANK=",),
    "store": ("fedmpi.comm.rendezvous.store_server", "OMPI_COMM_WORLD_RANK=0"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_to_a_launch_script_during_the_start_stops_the_job(start, moment):
    """The signal comes before the launcher or the ranks have handlers, or while the ranks connect."""
    job = start("script mpirun", 2)
    job.wait_for(lambda: processes(str(job.folder), *MOMENTS[moment]) or job.rows())
    job.process.terminate()
    assert job.wait() == RESUMABLE, job.text()
    assert "Traceback" not in job.text()


@pytest.mark.parametrize(("kind", "size"), [("alone", 1), ("mpirun", 2)])
def test_a_signal_to_one_rank_during_the_start_stops_the_job(start, kind, size):
    """The signal comes as soon as the rank has handlers, long before its first round."""
    job = start(kind, size)
    pid = job.rank(size - 1) if size > 1 else job.process.pid
    job.wait_for(lambda: has_handler(pid, signal.SIGTERM))
    os.kill(pid, signal.SIGTERM)
    assert job.wait() == RESUMABLE, job.text()
    assert job.summary()["exit_reason"] in ("stopped", f"signal {int(signal.SIGTERM)}")
    assert "Traceback" not in job.text()


def has_handler(pid, number):
    with open(f"/proc/{pid}/status") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return bool(mask >> (number - 1) & 1)


def test_a_signal_ends_a_rank_that_waits_for_the_others(tmp_path):
    """Otherwise it would wait for them for comm.start_timeout_s."""
    config = CONFIG | {"output": str(tmp_path), "comm": {"start_timeout_s": 3000}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code = "import sys; sys.argv = ['fedmpi', 'run', sys.argv[1]]; from fedmpi.common import signals; "
    code += "signals.EXIT_DELAY_S = 1; from fedmpi.cli import main; main()"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    env = clean_env(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **told)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run.yaml")], env=env, cwd=ROOT)
    wait_until(lambda: has_handler(process.pid, signal.SIGTERM))
    process.terminate()
    assert process.wait(600) == RESUMABLE
