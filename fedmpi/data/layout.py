"""How the pictures of a batch lie in memory: (n, C, H, W), or (n, H, W, C) blocks that are shown as (n, C, H, W)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_memory_format(x: Tensor, blocks: bool) -> Tensor:
    """Store a batch of pictures as (n, H, W, C) blocks, or as (n, C, H, W); other tensors stay as they are."""
    if x.ndim != 4 or stored_channels_last(x) == blocks:
        return x
    # clone, not to(): the latter leaves one-channel images as they are, see stored_channels_last
    return x.clone(memory_format=torch.channels_last if blocks else torch.contiguous_format)


def stored_channels_last(x: Any) -> bool:
    """Whether x is channels_last by its strides, as convolutions see it: one channel is contiguous in both formats."""
    known = isinstance(x, Tensor) and x.ndim == 4 and x.stride(1) == 1
    return known and x.is_contiguous(memory_format=torch.channels_last)
