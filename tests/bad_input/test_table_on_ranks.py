"""The same mistakes under a launcher: rank 0 alone speaks, once; exit code 2, at once, and no rank is left."""

import time

import pytest
from harness import CASES, check, soon_s, write
from helpers import fedmpi, gone

# Found before torch is imported, and after: what files of data hold, what the parts say about each other.
EARLY = [
    "colour=red",
    "train.optim=adam",
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


@pytest.mark.parametrize("label", [*EARLY, *LATE])
def test_three_ranks(tmp_path, label):
    case = CASES[label]
    arguments = write(case, tmp_path)
    for _ in range(2):  # once more where the machine was busy
        began = time.monotonic()
        done = fedmpi("run", *arguments, kind="mpirun", size=3, limit_s=120, cwd=tmp_path)
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
    done = fedmpi("run", *write(case, tmp_path), cwd=tmp_path)
    check(case, done.returncode, done.stdout, done.stderr)
    assert time.monotonic() - began < soon_s()


def test_torchrun(tmp_path):
    """It has an exit code and frames of its own."""
    case = CASES["data.partition.clients=5000"]
    done = fedmpi("run", *write(case, tmp_path), kind="torchrun", size=2, limit_s=120, cwd=tmp_path)
    said = done.stderr + done.stdout
    assert done.returncode != 0
    assert said.count("fedmpi: error: ") == 1, said
    assert "fedmpi [rank" not in said
    assert "fedmpi/" not in said
    assert gone(str(tmp_path))
