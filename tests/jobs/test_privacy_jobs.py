"""Differential privacy in jobs of several ranks: one process draws the noise again, and a lost rank costs nothing."""

import subprocess

import pytest
import yaml
from helpers import fedmpi, launcher, warm_env
from real_job import hashes, rows, succeed

LIMIT_S = 240
MODEL = """
import os
from torch import nn

class Model(nn.Sequential):
    passes = 0
    def forward(self, x):
        Model.passes += self.training
        if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("DYING_RANK", "") and Model.passes == 5:
            os._exit(9)  # in the second round, in which each rank trains one client in four steps
        return super().forward(x)

def model(input_shape, classes):
    return Model(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, classes))
"""
CLIENT = {"unit": "client", "clip": 0.5, "noise_multiplier": 0.5, "delta": 0.01}
SAMPLE = {"unit": "sample", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a config file and returns its path; the key of the noise is in `key`."""
    pytest.importorskip("dp_accounting")
    (tmp_path / "plugin.py").write_text(MODEL)

    def write(name, dp, **changes):
        tree = {
            "name": name,
            "rounds": 3,
            "output": str(tmp_path),
            "report": False,
            "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
            "model": {"name": f"{tmp_path}/plugin.py:model"},
            "method": {"name": "scaffold"},
            "train": {"batch_size": 100, "lr": 0.1, "momentum": 0},
            "cohort": {"placement": "pinned", "weighting": "uniform"},
            "privacy": {"dp": dp, "noise_file": str(tmp_path / "key")},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree | changes))
        return path

    return write


def verify(path):
    done = fedmpi("verify", path, "--rounds", "all", "--trust")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rounds replayed: the same bits and metrics" in done.stdout


@pytest.mark.parametrize(
    ("dp", "changes"),
    [
        (CLIENT, {"cohort": {"sampling": "poisson", "fraction": 0.5, "weighting": "uniform"}}),
        (CLIENT | {"adaptive": {"quantile": 0.5, "count_noise": 1.0}}, {"server": {"placement": "sharded"}}),
        (SAMPLE, {"model": {"name": "mlp"}}),
    ],
    ids=["poisson", "adaptive, sharded", "samples"],
)
def test_one_process_verifies_a_job_of_three_ranks(config, tmp_path, dp, changes):
    succeed("run", config("job", dp, **changes), kind="mpirun", size=3)
    assert len(hashes(tmp_path / "job")) == 3
    verify(tmp_path / "job")


def test_a_rank_is_lost(config, tmp_path):
    """The round is repeated with the same clients; nothing had been released before, so that it counts once."""
    path = config("redo", CLIENT, faults={"on_lost_rank": "redo"})
    mpirun, *options = launcher("mpirun", 5)
    command = [mpirun, "--with-ft", "ulfm", *options, "fedmpi", "run", str(path)]
    subprocess.run(command, env=warm_env() | {"DYING_RANK": "2"}, capture_output=True, timeout=LIMIT_S, check=False)
    assert [row["round"] for row in rows(tmp_path / "redo", "faults.jsonl")] == [1]
    assert [row["round"] for row in rows(tmp_path / "redo", "releases.jsonl")] == [0, 1, 2]
    verify(tmp_path / "redo")
