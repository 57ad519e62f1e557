"""A run directory that a job uses is left alone by all others; who asks for its status sees the job."""

import json
import signal

import pytest
from helpers import fedmpi
from real_job import AGAIN, LIMIT_S, succeed, wait_until


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(("kind", "size"), [("alone", 1), ("mpirun", 2)])
def test_a_run_that_lives_is_not_gone_on_with(start, kind, size):
    """Stopped meanwhile, so that nothing but the second job could touch the directory. Killed, it has no lock."""
    job = start()
    job.wait_for_rounds(1)
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(job.process.pid))
    before = contents(job.run)
    done = fedmpi("resume", job.run, kind=kind, size=size)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert f"{job.run} is in use: process {job.process.pid} on host" in done.stderr
    assert contents(job.run) == before
    job.kill()
    done = succeed("resume", job.run, f"rounds={len(job.rows()) + 3}")


@pytest.mark.smoke
def test_the_status_of_a_real_run_stopped_gone_on_with_and_killed(start):
    job = start()
    job.wait_for_rounds(1)
    done = succeed("status", job.run)
    assert f"running (process {job.process.pid} on " in done.stdout
    assert "1 on 1 host" in done.stdout
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(LIMIT_S) == AGAIN
    done = fedmpi("status", job.run, "--json")
    assert (json.loads(done.stdout)["state"], done.returncode) == ("stopped", AGAIN)
    job.start("checkpoint.resume=must")
    job.wait_for(lambda: not (job.run / "summary.json").exists())
    assert fedmpi("status", job.run).returncode == 0
    job.kill()
    done = fedmpi("status", job.run)
    assert done.returncode == AGAIN
    assert "state       died" in done.stdout
    assert f"fedmpi resume {job.run}" in done.stdout
