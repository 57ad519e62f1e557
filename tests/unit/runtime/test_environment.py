"""The switches of PyTorch that decide the bits of a GPU."""

import warnings

import pytest
import torch
from helpers import settings

from fedmpi.runtime.device import configure_numerics


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
        configure_numerics(settings(compute={"tf32": tf32}))
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32


def test_a_cpu_knows_no_tf32(switches):
    """The switch of GPUs leaves the bits of a CPU alone."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for tf32 in (False, True):
        configure_numerics(settings(compute={"tf32": tf32}))
        found.append((x @ x, torch.conv2d(x[None, None], x[None, None, :5, :5])))
    assert all(map(torch.equal, *found))
