"""Mistakes in a config under a launcher: rank 0 alone reports them, once; the exit code is 2, and no rank remains."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from error_cases import CASES, check, write
from helpers import BIN, ROOT, clean_env, fedmpi, wait_until_ended

# Found before torch is imported, and after: what files of data hold, what the parts say about each other.
EARLY = ["colour=red", "model.name=none.py:f", "compute.threads=100000", "base is the file"]
LATE = ["method.learning_rate=1", "data.partition.clients=5000", "csv: inf"]
COLD = ["colour=red", "data.partition.clients=5000"]  # one of each as the ranks start, imports and all


@pytest.mark.parametrize("label", [*EARLY[1:], *LATE, pytest.param(EARLY[0], marks=pytest.mark.smoke)])
def test_three_ranks_print_one_message(tmp_path, label):
    case = CASES[label]
    done = fedmpi("run", *write(case, tmp_path), kind="mpirun", size=3, cold=label in COLD, cwd=tmp_path)
    check(case, done.returncode, done.stdout, done.stderr)
    assert not (tmp_path / "runs").exists()
    assert wait_until_ended(str(tmp_path))


def test_ranks_of_torchrun_print_one_message(tmp_path):
    """The launcher torchrun has its own exit code and prints stack frames."""
    case = CASES["data.partition.clients=5000"]
    done = fedmpi("run", *write(case, tmp_path), kind="torchrun", size=2, cold=True, cwd=tmp_path)
    said = done.stderr + done.stdout
    assert done.returncode != 0
    assert said.count("fedmpi: error: ") == 1, said
    assert "fedmpi [rank" not in said
    assert f"{ROOT}/fedmpi/" not in said  # no frame of a traceback
    assert wait_until_ended(str(tmp_path))


def test_a_rank_that_torchrun_ends_prints_nothing(tmp_path):
    """Rank 0 has found the mistake and ended.

    A rank that is still importing gets SIGTERM, and then finds the mistake, too.
    """
    arguments = write(CASES["data.partition.clients=5000"], tmp_path)
    env = clean_env(
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="1",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="9",
        TORCHELASTIC_RUN_ID="a",
    )
    command = [str(BIN / "fedmpi"), "run", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as rank:
        while not has_handler(rank.pid, signal.SIGTERM):
            time.sleep(0.01)
        rank.terminate()
        assert rank.communicate(timeout=120)[1] == ""
    assert rank.returncode == 2


def has_handler(pid, number):
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1
