"""Rows of one client, and their mini-batches: one permutation per epoch.

The permutation is drawn on the CPU, so that every device sees the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

AHEAD = 1 << 18  # bytes
ALIGNED = 64  # bytes; torch's allocator gives no other addresses


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows `index` of x and y; x and y may be shared with other shards. The index stays on the CPU."""

    x: Tensor
    y: Tensor
    index: Tensor  # (n,) int64

    def __len__(self) -> int:
        return len(self.index)


def batches(
    shard: Shard,
    size: int | None,
    generator: torch.Generator | None,
    drop_last: bool = False,
    views: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of (x, y), `size` rows each; the last, partial batch is kept unless drop_last.

    size None: all rows at once. generator None (evaluation) and size None keep the order of the index and draw nothing.
    With drop_last a shard smaller than `size` gives no batch: its client makes no step and its update is zero.
    views: x may be a view of the shard's, where rows follow one another; not to be written to.
    """
    n = len(shard)
    index = order(shard, size, generator).to(shard.x.device)  # once an epoch, not once a batch
    step = size or max(n, 1)
    stop = n - n % step if drop_last else n
    blocks = stored_channels_last(shard.x)
    x = shard.x.permute(0, 2, 3, 1) if blocks else shard.x
    first = _first(index) if views else None
    if first is not None:
        yield from _in_place(x, shard.y, index[:stop], first, step, blocks)
        return
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


def _in_place(
    x: Tensor, y: Tensor, index: Tensor, first: int, step: int, blocks: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of rows that follow one another from `first` on: views, where data lie as a copy's would."""
    for start in range(0, len(index), step):
        rows = index[start : start + step]
        found = x[first + start : first + start + len(rows)]
        # Kernels sum in another order where data do not begin at a multiple of 64 bytes, as those of any tensor do.
        if found.data_ptr() % ALIGNED:
            found = x.index_select(0, rows)
        yield found.permute(0, 3, 1, 2) if blocks else found, y.index_select(0, rows)


def _first(index: Tensor) -> int | None:
    """Where the rows begin, if each follows the one before."""
    if not len(index):
        return None
    first = int(index[0])
    return first if bool((index == torch.arange(first, first + len(index), device=index.device)).all()) else None


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; images stored as (n, H, W, C) blocks are gathered as such, so that the result is channels_last, too."""
    if stored_channels_last(x):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)


def stored_channels_last(x: Tensor) -> bool:
    """Whether x is channels_last by its strides, as convolutions see it: one channel is contiguous in both formats."""
    return x.ndim == 4 and x.stride(1) == 1 and x.permute(0, 2, 3, 1).is_contiguous()
