"""What environment.json says of the ranks' GPUs."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import settings, small_settings

from fedmpi.runtime.record import metadata
from fedmpi.runtime.run import execute, set_numerics


@pytest.fixture
def card(monkeypatch):
    """A stand-in for one GPU, with a PyTorch for CUDA."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="4d2c-11"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)


@pytest.fixture
def switches(monkeypatch):
    """Set PyTorch's switches back to its defaults afterwards."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_that_of_the_config(switches, tf32):
    """Also that of convolutions, which PyTorch multiplies in TF32 by itself; without a warning of an outdated name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_numerics(settings(compute={"tf32": tf32}))
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32


def test_a_cpu_knows_no_tf32(switches):
    """The switch of GPUs leaves the bits of a CPU alone."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for tf32 in (False, True):
        set_numerics(settings(compute={"tf32": tf32}))
        found.append((x @ x, torch.conv2d(x[None, None], x[None, None, :5, :5])))
    assert all(map(torch.equal, *found))


def test_of_a_gpu(card, monkeypatch):
    gpu = torch.device("cuda", 0)
    assert metadata.describe_gpu(gpu) == {"gpu": "4d2c-11", "cudnn": "91002", "nccl": "2.27.5"}
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert metadata.describe_gpu(gpu) == {"gpu": "4d2c-11", "cudnn": "91002"}


def test_a_rank_on_a_cpu_has_no_facts_of_a_gpu(tmp_path):
    execute(small_settings("fedavg", "mlp", rounds=0, output=str(tmp_path), report=False))
    (rank,) = json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"]
    assert not {"cudnn", "nccl"} & set(rank)
