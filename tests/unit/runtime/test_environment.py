"""The settings of PyTorch that affect the last bits of results on a GPU."""

import warnings

import pytest
import torch
from helpers import settings

from fedmpi.runtime.device import configure_numerics


@pytest.fixture
def switches(monkeypatch):
    """Restore PyTorch's default settings after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_follows_the_config(switches, tf32):
    """This includes convolutions, for which PyTorch enables TF32 by default; no deprecation warning is issued."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure_numerics(settings(compute={"tf32": tf32}))
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32


def test_tf32_does_not_change_results_on_a_cpu(switches):
    """The setting of TF32 does not change results on a CPU."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for tf32 in (False, True):
        configure_numerics(settings(compute={"tf32": tf32}))
        results.append((x @ x, torch.conv2d(x[None, None], x[None, None, :5, :5])))
    assert all(map(torch.equal, *results))
