"""Fixtures and options of all tests: the option --write-golden, and a Slurm cluster."""

import os
import secrets
import shutil
import subprocess

import pytest
from helpers import ROOT, clean_env

os.environ.setdefault("FEDMPI_SECRET", secrets.token_hex(32))  # tests must not write to the user's home directory


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="write the golden losses of the selected methods anew")


@pytest.fixture(scope="session")
def slurm_env():
    """Yield the environment variables of a running Slurm: the caller's, or one that is started for the tests."""
    if not shutil.which("sbatch"):
        pytest.skip("no sbatch on PATH")
    env = clean_env()
    running = subprocess.run(["sinfo"], env=env, capture_output=True).returncode == 0
    if running:
        yield env
        return
    script = str(ROOT / "tests" / "slurm_cluster.sh")
    if os.geteuid() != 0 or not shutil.which("slurmctld", path="/usr/sbin:/usr/bin"):
        pytest.skip("no Slurm is running, and starting one needs root, slurm-wlm and munge")
    # The daemons inherit the script's stderr; capturing it would wait until they end.
    started = subprocess.run([script, "start"], env=env, stdout=subprocess.PIPE, text=True)
    if started.returncode:
        pytest.skip("the Slurm of the tests does not start here; its log stands above")
    yield env | {"SLURM_CONF": started.stdout.strip()}
    subprocess.run([script, "stop"], env=env, check=True)
