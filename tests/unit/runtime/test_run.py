"""What rank 0 warns of before a run."""

import pytest
import yaml
from helpers import fedmpi, small_settings

from fedmpi.runtime import run


@pytest.mark.parametrize(
    ("size", "backend", "trains", "warns"),
    [
        (2, "nccl", False, True),
        (8, "nccl", False, True),
        (9, "nccl", False, False),
        (4, "nccl", True, False),
        (4, "gloo", False, False),
        (1, "solo", False, False),
    ],
)
def test_a_gpu_on_which_rank_0_trains_nobody(size, backend, trains, warns):
    said = run.unused_gpu(small_settings("fedavg", "mlp", server={"trains": trains}), size, backend)
    assert bool(said) == warns
    if warns:
        assert said.startswith(f"rank 0 occupies one of {size} GPUs, and trains nobody on it")
        assert "server.trains=true" in said


def test_it_is_in_the_log(monkeypatch, tmp_path):
    config = {"name": "run", "rounds": 0, "output": str(tmp_path), "report": False, "method": {"name": "fedavg"}}
    config |= {
        "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 2}},
        "model": {"name": "logistic"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(run, "unused_gpu", lambda settings, size, backend: f"unused with {size} by {backend}")
    done = fedmpi("run", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "warning: unused with 1 by solo" in (tmp_path / "run" / "log.txt").read_text()
