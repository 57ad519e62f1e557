"""Frozen parameters in real runs: stored once, exported, and the same on all ranks."""

import json
import shutil
import subprocess

import pytest
import torch
from helpers import BIN, clean_env, launcher
from safetensors.torch import load_file

import fedmpi

RUN = """\
rounds: 2
output: {folder}
name: frozen
data: {{source: digits, partition: {{scheme: iid, clients: 4}}}}
model: {{name: "model.py:net"}}
method: {{name: fedavg}}
checkpoint: {{every: 1}}
compute: {{threads: 1}}
"""


MODEL = """\
import os
import torch
from torch import nn

def net(input_shape, classes):
    backbone = nn.Linear(64, 50).requires_grad_(False)
    nn.init.constant_(backbone.weight, VALUE)
    return nn.Sequential(nn.Flatten(), backbone, nn.Linear(50, classes))
"""


def command(folder, *words, ranks=1):
    start = launcher("mpirun" if ranks > 1 else "alone", ranks)
    line = [*start, str(BIN / "fedmpi"), *words]
    return subprocess.run(line, env=clean_env(), cwd=folder, capture_output=True, text=True, timeout=120)


def write(folder, value="float(open('backbone.txt').read())"):
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    (folder / "model.py").write_text(MODEL.replace("VALUE", value))
    (folder / "backbone.txt").write_text("0.01")


def test_frozen_parameters_are_stored_once_exported_and_recognised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    done = command(tmp_path, "run", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "510 parameters and 3,250 frozen ones" in done.stdout
    (run,) = tmp_path.glob("frozen*")
    tensors = load_file(run / "model.safetensors")
    assert sorted(tensors) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    assert (tensors["1.weight"] == 0.01).all()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["up_parameters"] == 4 * 510
    checkpoints = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    assert checkpoints < 4 * 3250 * 2  # they hold what is trained alone
    module = fedmpi.load(run, trust=True)
    assert torch.equal(module.state_dict()["1.weight"], tensors["1.weight"])
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)

    done = command(tmp_path, "resume", str(run), "rounds=4")
    assert done.returncode == 0, done.stderr
    shutil.copy(run / "model.safetensors", tmp_path / "four.safetensors")
    (tmp_path / "backbone.txt").write_text("0.02")  # the model's own file is what it was
    done = command(tmp_path, "resume", str(run), "rounds=5")
    assert done.returncode == 2, done.stderr
    assert "frozen parameters changed" in done.stderr
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole)
    assert command(whole, "run", "run.yaml", "rounds=4").returncode == 0
    (other,) = whole.glob("frozen*")
    mine, theirs = load_file(tmp_path / "four.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.smoke
def test_ranks_with_different_frozen_parameters_are_an_error(tmp_path):
    write(tmp_path, "float(os.environ['OMPI_COMM_WORLD_RANK'])")
    done = command(tmp_path, "run", "run.yaml", ranks=2)
    assert done.returncode == 2, done.stderr
    assert "rank 1 differs from rank 0 in (frozen parameters)" in done.stderr
    assert "Traceback" not in done.stderr
