"""What cuDNN's recurrent layers cannot do, which are torch's on a GPU: a backward pass in evaluation mode, and one of
the second order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Around a forward pass that is differentiated in one of these ways: torch's own kernels, which are slower, where
    the module has such layers."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(part, nn.RNNBase) for part in module.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
