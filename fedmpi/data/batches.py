"""Rows of one client, and their mini-batches: one permutation per epoch.

The permutation is drawn on the CPU, so that every device sees the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

AHEAD, ALIGNED = 1 << 18, 64  # bytes


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
    index = order(shard, size, generator).to(shard.x.device)  # once an epoch, not once a batch
    step = size or max(n, 1)
    stop = n - n % step if drop_last else n
    blocks = stored_channels_last(shard.x)
    x = shard.x.permute(0, 2, 3, 1) if blocks else shard.x
    ahead = _ahead(x, step)
    for begin in range(0, stop, ahead):
        rows = index[begin : min(begin + ahead, stop)]
        found, y = x.index_select(0, rows), shard.y.index_select(0, rows)
        found = found.permute(0, 3, 1, 2) if blocks else found
        if len(rows) <= step:
            yield found, y
            continue
        for start in range(0, len(rows), step):
            yield found[start : start + step], y[start : start + step]


def order(shard: Shard, size: int | None, generator: torch.Generator | None) -> Tensor:
    """(n,) the rows of one epoch, in the order in which `batches` cuts them up."""
    if size is None or generator is None:
        return shard.index
    return shard.index[torch.randperm(len(shard), generator=generator)]


def _ahead(x: Tensor, step: int) -> int:
    """How many rows are read at once: small batches come in one piece of memory, each of them aligned like its own."""
    size = step * x[:1].numel() * x.element_size()
    return step * max(AHEAD // size, 1) if size and size % ALIGNED == 0 else step


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; images stored as (n, H, W, C) blocks are gathered as such, so that the result is channels_last, too."""
    if stored_channels_last(x):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)


def stored_channels_last(x: Tensor) -> bool:
    """Whether x is channels_last by its strides, as convolutions see it: one channel is contiguous in both formats."""
    return x.ndim == 4 and x.stride(1) == 1 and x.permute(0, 2, 3, 1).is_contiguous()
