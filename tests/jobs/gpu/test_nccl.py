"""The communicator for GPUs: its code over gloo on CPUs, and NCCL on a GPU with one or several ranks."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import CPU, ROOT, clean_env, launcher, prepare, settings

from fedmpi.flat import linear

KINDS = {"gloo": ("torchrun", 3), "nccl": ("alone", 1), "nccl_shared": ("torchrun", 3)}
# Blocks of NCCL's kernels that wait for each other must all find room on the one GPU.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
IDLE = {"cohort": {"fraction": 0.15}}  # of three ranks one trains nobody
CHECKS = (ROOT / "tests" / "jobs" / "comm" / "battery.py").read_text().count("\ndef check_")


def skip_reason(kind):
    """Return why this machine cannot run a kind of battery; "" if it can."""
    if kind == "gloo":
        return ""
    if not torch.cuda.is_available():
        return "this machine has no GPU (NCCL has no other use)"
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    version = torch.cuda.nccl.version()
    if kind == "nccl_shared" and version < (2, 30):
        return f"NCCL {'.'.join(map(str, version))} refuses ranks that share a GPU; 2.30 does not"
    return ""


pytestmark = pytest.mark.xdist_group("nccl")  # all tests read one run


@pytest.fixture(scope="module", params=KINDS)
def battery(request, tmp_path_factory):
    if skip_reason(request.param):
        pytest.skip(skip_reason(request.param))
    folder = tmp_path_factory.mktemp(request.param)
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "gpu" / "nccl_ranks.py"), str(folder)]
    program += [request.param.partition("_")[0]]
    env = clean_env(**(SHARED if request.param == "nccl_shared" else {}))
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
        assert {report["class"] for report in reports} == {"NcclCommunicator"}
        assert not [report for report in reports if report["error"]], f"rank {rank}"
        assert len(reports) == CHECKS + (kind == "nccl")


def test_runs_give_the_bits_of_one_process(battery, monkeypatch):
    kind, folder, done = battery
    if kind == "nccl":
        pytest.skip("a single rank sends nothing")
    monkeypatch.setattr(linear, "CHUNK", 64)
    monkeypatch.setattr(linear, "BLOCK", 128)
    device = CPU if kind == "gloo" else torch.device("cuda", 0)
    alone, idle = (prepare(settings("scaffold", **cohort), device=device) for cohort in ({}, IDLE))
    for it in (alone, idle):
        it.fed.run()
    expected = {"root": alone.hashes, "sharded": alone.hashes, "idle": idle.hashes}
    assert json.loads((folder / "hashes").read_text()) == expected, done.stderr


def test_a_silent_rank_is_named(battery):
    kind, folder, done = battery
    if kind == "nccl":
        pytest.skip("a single rank has nobody to wait for")
    said = [json.loads((folder / f"{rank}.silence").read_text()) for rank in range(3)]
    assert "rank 2 is silent: no message from or to it for 2 s" in said[0], done.stderr
    assert "rank 2 is silent: no message from or to it for 1 s" in said[1], done.stderr


@pytest.mark.parametrize(("version", "reason"), [((2, 29, 7), "NCCL 2.29.7 refuses ranks that"), ((2, 30, 0), "")])
def test_ranks_share_a_gpu_only_with_an_nccl_that_allows_it(monkeypatch, version, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert skip_reason("nccl_shared").startswith(reason)
    assert bool(skip_reason("nccl_shared")) == bool(reason)
    assert not skip_reason("nccl")
