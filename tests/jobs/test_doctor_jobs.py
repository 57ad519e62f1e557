"""fedmpi doctor as a command: what it prints if much is wrong, and that it cannot hang."""

import os
import signal
import subprocess

import pytest
import torch
from helpers import BIN, ROOT, clean_env, fedmpi, find_processes, wait_until_ended
from real_job import succeed, wait_until

QUICK = str(ROOT / "configs" / "quickstart.yaml")


NEEDS_CPU_TORCH = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Remove the launcher's variables."""
    for name in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(name)


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_ctrl_c_ends_the_programs_that_doctor_runs(tmp_path):
    program(tmp_path / "mpirun", "exec sleep 987.75")
    env = clean_env()
    doctor = subprocess.Popen(
        [BIN / "fedmpi", "doctor"], env=env | {"PATH": f"{tmp_path}:{env['PATH']}"}, stdout=subprocess.DEVNULL
    )
    wait_until(lambda: find_processes("987.75"))
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait(240) == 130
    assert wait_until_ended("987.75")


@NEEDS_CPU_TORCH
def test_a_report_with_everything_wrong(tmp_path):
    """An mpirun hangs, the config cannot run, and a secret is on the command line and in the environment."""
    program(tmp_path / "mpirun", "exec sleep 986.5")
    env = clean_env(MY_TOKEN="hunter2")
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    done = fedmpi("doctor", QUICK, "compute.device=cuda", "data.token=hunter2", "output=/dev/null", env=env, cold=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "hunter2" not in done.stdout
    marked = [row.split()[1] for row in done.stdout.splitlines() if row.startswith("! ")]
    assert marked == ["output", "device", "memory", "the"]
    assert "\n? mpirun         did not answer within 5 s\n" in done.stdout
    assert [row for row in done.stdout.splitlines() if row[0] not in " !?"] == [
        "software",
        "ranks",
        "machine",
        "config",
    ]
    assert wait_until_ended("986.5")


@pytest.mark.smoke
def test_doctor_prints_one_report_under_a_launcher(tmp_path):
    done = succeed("doctor", QUICK, f"output={tmp_path}", kind="mpirun", size=2, cold=True)
    assert done.stdout.count("\n  python ") == 1
    assert "\n  ranks          2 (mpi), 2 of them on this host\n" in done.stdout
    assert "\n  mpi_init       works in one process\n" in done.stdout
    assert not list(tmp_path.iterdir())


def test_doctor_succeeds_without_a_config():
    done = fedmpi("doctor", cold=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n! " not in done.stdout.rpartition("! the config cannot run")[0]
    assert "config\n" not in done.stdout
