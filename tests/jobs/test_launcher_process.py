"""Which process is the launcher, and whether it lives."""

import os
import subprocess
import sys

import pytest
from helpers import clean_env

from fedmpi.comm.job import is_alive

SHOW = """import os; from fedmpi.comm.job import find_launcher as find
print(find(os.getppid(), ['RANK']), os.getppid())"""
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")


def test_a_script_between_launcher_and_rank_is_not_the_launcher():
    """The launcher, here this test, knows no RANK; the shell that it starts as rank 1 does."""
    words = f'{sys.executable} -c "{SHOW}"; true'  # true: the shell stays, and does not become python
    said = subprocess.run(["sh", "-c", words], env=clean_env(RANK="1"), capture_output=True, text=True, check=True)
    launcher, shell = map(int, said.stdout.split())
    assert launcher == os.getpid()
    assert shell != os.getpid()


def test_without_a_script_the_parent_is_the_launcher():
    command = [sys.executable, "-c", SHOW]
    said = subprocess.run(command, env=clean_env(RANK="1"), capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(os.getpid())] * 2


def test_dead_and_not_yet_buried_is_dead():
    child = subprocess.Popen(["sleep", "100"])
    assert is_alive(child.pid, os.getppid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; nobody has asked for its exit code
    assert not is_alive(child.pid, os.getppid())
    child.wait()
    assert not is_alive(child.pid, os.getppid())
