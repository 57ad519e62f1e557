"""The same mistakes under a launcher: rank 0 alone speaks, once; exit code 2, at once, and no rank is left."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from error_cases import CASES, check, soon_s, write
from helpers import BIN, clean_env, fedmpi, gone

# Found before torch is imported, and after: what files of data hold, what the parts say about each other.
EARLY = [
    "colour=red",
    "train.optim=lion",
    "learning_rate=0.1",
    "base=[a.yaml]",
    "model.name=none.py:f",
    "model=mlp",
    "seed=-1",
    "seed=9007199254740993",
    "rounds=true",
    'name="a\\0b"',
    "output=run.yaml",
    "train.lr=.nan",
    "evaluate.protocol=[global, global]",
    "compute.threads=100000",
    "data.silos=[a]",
    "train.decay=0.5",
    "anchor bomb",
    "merge bomb",
    "deep",
    "large",
    "base is a device",
    "base is a pipe",
    "base is the file",
    "duplicate key",
]
LATE = [
    "method.mu=1",
    "data.partition.clients=5000",
    "no such file",
    "csv: inf",
    "objects",
    "negative labels",
]
COLD = ["colour=red", "data.partition.clients=5000"]  # one of each as the ranks start, imports and all


@pytest.mark.parametrize("label", [*EARLY, *LATE])
def test_three_ranks(tmp_path, label):
    case = CASES[label]
    arguments = write(case, tmp_path)
    for _ in range(2):  # once more where the machine was busy
        began = time.monotonic()
        done = fedmpi("run", *arguments, kind="mpirun", size=3, cold=label in COLD, cwd=tmp_path)
        seconds = time.monotonic() - began
        check(case, done.returncode, done.stdout, done.stderr)
        if seconds < soon_s():
            break
    assert seconds < soon_s()
    assert not (tmp_path / "runs").exists()
    assert gone(str(tmp_path))


def test_the_command_itself(tmp_path):
    """What the table of single processes tries in forked ones."""
    case = CASES["csv: inf"]
    began = time.monotonic()
    done = fedmpi("run", *write(case, tmp_path), cold=True, cwd=tmp_path)
    check(case, done.returncode, done.stdout, done.stderr)
    assert time.monotonic() - began < soon_s()


def test_torchrun(tmp_path):
    """It has an exit code and frames of its own."""
    case = CASES["data.partition.clients=5000"]
    done = fedmpi("run", *write(case, tmp_path), kind="torchrun", size=2, cold=True, cwd=tmp_path)
    said = done.stderr + done.stdout
    assert done.returncode != 0
    assert said.count("fedmpi: error: ") == 1, said
    assert "fedmpi [rank" not in said
    assert "fedmpi/" not in said
    assert gone(str(tmp_path))


def test_a_rank_that_torchrun_ends_adds_nothing(tmp_path):
    """Rank 0 has found the mistake and gone; one that imports longer is told to end, and then finds it, too."""
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
        while not handles(rank.pid, signal.SIGTERM):
            time.sleep(0.01)
        rank.terminate()
        assert rank.communicate(timeout=120)[1] == ""
    assert rank.returncode == 2


def handles(pid, number):
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1
