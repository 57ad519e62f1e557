"""Rows of one client, and their mini-batches: one permutation per epoch.

The permutation is drawn on the CPU, so that every device sees the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows `index` of x and y; x and y may be shared with other shards. The index stays on the CPU."""

    x: Tensor
    y: Tensor
    index: Tensor  # (n,) int64

    def __len__(self) -> int:
        return len(self.index)


def batches(
    shard: Shard, size: int | None, generator: torch.Generator | None, drop_last: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of (x, y), `size` rows each; the last, partial batch is kept unless drop_last.

    size None: all rows at once. generator None (evaluation) and size None keep the order of the index and draw nothing.
    With drop_last a shard smaller than `size` gives no batch: its client makes no step and its update is zero.
    """
    n = len(shard)
    index = shard.index if size is None or generator is None else shard.index[torch.randperm(n, generator=generator)]
    index = index.to(shard.x.device)  # once an epoch, not once a batch
    step = size or max(n, 1)
    stop = n - n % step if drop_last else n
    blocks = stored_channels_last(shard.x)
    x = shard.x.permute(0, 2, 3, 1) if blocks else shard.x
    for start in range(0, stop, step):
        rows = index[start : min(start + step, stop)]
        found = x.index_select(0, rows)
        yield found.permute(0, 3, 1, 2) if blocks else found, shard.y.index_select(0, rows)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; images stored as (n, H, W, C) blocks are gathered as such, so that the result is channels_last, too."""
    if stored_channels_last(x):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)


def stored_channels_last(x: Tensor) -> bool:
    """Whether x is channels_last by its strides, as convolutions see it: one channel is contiguous in both formats."""
    return x.ndim == 4 and x.stride(1) == 1 and x.permute(0, 2, 3, 1).is_contiguous()
