"""The same run twice on one device, also if interrupted and resumed, gives the same bits."""

import json

import pytest
import torch
from helpers import fedmpi

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
WORDS = [
    *("model={name: mcmahan_cnn}", "method={name: scaffold}", "data.partition.clients=6", "cohort.fraction=0.5"),
    *("train.epochs=1", "train.momentum=0", "compute.deterministic=true"),
]


def hashes(directory):
    return [json.loads(line)["sha256"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_resumed_run_gives_the_same_bits(tmp_path, device):
    words = [*WORDS, f"compute.device={device}", f"output={tmp_path}"]
    for name, rounds in (("whole", 4), ("cut", 2)):
        done = fedmpi("run", "configs/quickstart.yaml", *words, f"name={name}", f"rounds={rounds}")
        assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "cut") == hashes(tmp_path / "whole")[:2]
    done = fedmpi("resume", tmp_path / "cut", "rounds=4")
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "cut") == hashes(tmp_path / "whole")
    environment = json.loads((tmp_path / "whole" / "environment.json").read_text())
    assert environment["ranks"][0]["device"].startswith("cpu") == (device == "cpu")
