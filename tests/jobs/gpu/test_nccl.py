"""The communicator of GPUs: its own code on CPUs, over gloo; on a GPU over NCCL, with a single rank."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, clean_env, launcher, play, settings

from fedmpi.flat import linear

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU (NCCL has no other use)")
KINDS = {"gloo": ("torchrun", 3), "nccl": ("alone", 1)}
CHECKS = (ROOT / "tests" / "jobs" / "comm" / "battery.py").read_text().count("\ndef check_")


pytestmark = pytest.mark.xdist_group("nccl")  # all tests read one run


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=NEEDS_GPU)])
def battery(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "gpu" / "nccl_ranks.py"), str(folder), request.param]
    env = clean_env(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [*launcher(*KINDS[request.param]), *program], env=env, capture_output=True, text=True, timeout=600
    )
    return request.param, folder, done


def test_battery(battery):
    kind, folder, done = battery
    assert done.returncode == 0, done.stderr
    size = KINDS[kind][1]
    for rank in range(size):
        reports = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        assert {report["class"] for report in reports} == {"Nccl"}
        assert not [report for report in reports if report["error"]], f"rank {rank}"
        assert len(reports) == CHECKS + (kind == "nccl")


def test_runs_have_the_bits_of_one_process(battery, monkeypatch):
    kind, folder, done = battery
    if kind == "nccl":
        pytest.skip("a single rank sends nothing")
    monkeypatch.setattr(linear, "CHUNK", 64)
    monkeypatch.setattr(linear, "BLOCK", 2)
    alone, idle = play(settings("scaffold")).hashes, play(settings("scaffold", cohort={"fraction": 0.15})).hashes
    expected = {"root": alone, "sharded": alone, "idle": idle}
    assert json.loads((folder / "hashes").read_text()) == expected, done.stderr


def test_a_silent_rank_is_named(battery):
    kind, folder, done = battery
    if kind == "nccl":
        pytest.skip("a single rank has nobody to wait for")
    said = [json.loads((folder / f"{rank}.silence").read_text()) for rank in range(3)]
    assert "rank 2 is silent: no message from or to it for 2 s" in said[0], done.stderr
    assert "rank 2 is silent: no message from or to it for 1 s" in said[1], done.stderr
