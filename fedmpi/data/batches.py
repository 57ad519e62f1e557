"""The rows of one client and their mini-batches: one permutation per epoch.

The permutation is drawn on the CPU, so that all devices use the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.inputs import Inputs, concatenate
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.partitions.base import Partition
from fedmpi.data.streaming import Stream, prefetch
from fedmpi.data.transforms.base import stored_channels_last

# Bytes of samples that are read at once from memory. On a CPU they stay in its cache; on a GPU one kernel gathers all
# batches of a piece.
READ_BYTES, READ_BYTES_ON_GPU = 1 << 18, 1 << 24
ALIGNMENT = 64  # bytes, the alignment of torch's allocator

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows `index` of x and y, which may be shared with other shards. The index is always on the CPU."""

    x: Any  # (n, ...) tensor, Pictures, or Inputs (several tensors by name)
    y: Tensor
    index: Tensor  # (n,) int64

    def __len__(self) -> int:
        return self.index.shape[0]  # faster than len(self.index)

    @property
    def random_numbers_per_sample(self) -> int:
        """Number of uniform random numbers that the augmentation of one sample needs."""
        return self.x.pipeline.random_numbers if isinstance(self.x, LazyImages) else 0


class LazyClientMapping(Mapping[int, T]):
    """A mapping of clients 0..N-1 to values that are computed on access, since most clients may never be drawn."""

    def __init__(self, clients: int, make: Callable[[int], T]) -> None:
        self._clients, self._make = range(clients), make

    def __getitem__(self, client: int) -> T:
        if client not in self._clients:
            raise KeyError(client)
        return self._make(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class ClientShards(LazyClientMapping[Shard]):
    """The training or test data of all clients, each of which is a selection of rows of the same tensors x and y.

    rows: the row numbers of each client, (n_k,) int64 arrays or tensors.
    """

    def __init__(self, x: Any, y: Tensor, rows: Sequence[Any] | Partition | LazyClientMapping[Any]) -> None:
        super().__init__(len(rows), lambda k: Shard(x, y, torch.as_tensor(rows[k])))
        self.x, self.y, self.rows = x, y, rows


def replace_samples(
    shards: Mapping[K, Shard], x: Callable[[Any], Any], y: Callable[[Tensor], Tensor] = lambda y: y
) -> Mapping[K, Shard]:
    """Return shards with samples replaced by x(samples) and targets by y(targets), and the same rows by client."""
    if isinstance(shards, ClientShards):
        return ClientShards(x(shards.x), y(shards.y), shards.rows)  # type: ignore[return-value]
    return {k: Shard(x(shard.x), y(shard.y), shard.index) for k, shard in shards.items()}


def distinct_samples(shards: Mapping[int, Shard]) -> Iterator[tuple[int, Any, Tensor]]:
    """Yield (client, x, y) for each client, or only for client 0 if all clients share x and y."""
    if isinstance(shards, ClientShards):
        return iter([(0, shards.x, shards.y)])
    return ((k, shard.x, shard.y) for k, shard in shards.items())


def merge_shards(shards: Mapping[int, Shard]) -> Shard:
    """Return one shard with the rows of all clients in ascending order; the clients must share x and y."""
    if isinstance(shards, ClientShards) and isinstance(shards.rows, Partition):
        return Shard(shards.x, shards.y, torch.from_numpy(np.sort(shards.rows.order)))
    parts = list(shards.values())
    return Shard(parts[0].x, parts[0].y, torch.cat([shard.index for shard in parts]).sort().values)


def batches(
    shard: Shard,
    size: int | None,
    generator: torch.Generator | None,
    drop_last: bool = False,
    augment: torch.Generator | None = None,
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the batches (x, y) of one epoch, of `size` rows each. The last, partial batch is kept unless drop_last.

    Args:
        size: rows of a batch; None: all rows at once.
        generator: draws the permutation. None (evaluation), like size None, keeps the order of the index.
        drop_last: leave out the partial batch. A shard of fewer than `size` rows then has no batch: its client makes no
            step, and its update is zero.
        augment: draws the random numbers by which pictures are changed (data.augment); None: no augmentation.
    """
    n, index = len(shard), epoch_order(shard, size, generator)
    step = size or max(n, 1)
    stop = n - n % step if drop_last else n
    if not stop:
        return
    there = index.to(shard.x.device, non_blocking=True)  # once per epoch rather than per batch
    on_disk = isinstance(shard.x, LazyImages) and isinstance(shard.x.stored, Stream)
    u, ahead = draw_augmentation_numbers(shard, augment), _rows_per_read(shard.x, step, on_disk)
    # The reading thread uses the index on the CPU: a copy from the GPU would wait for all training queued there.
    with closing(prefetch(shard.x.read_stored, index[:stop].split(ahead))) if on_disk else nullcontext() as read:
        for begin in range(0, stop, ahead):
            rows = there[begin : min(begin + ahead, stop)]
            v = None if u is None else u[begin : begin + len(rows)]
            x = gather_samples(shard.x, rows, v) if read is None else shard.x.to_inputs(next(read), v)
            y = shard.y.index_select(0, rows)
            if ahead == step:
                yield x, y
            else:
                yield from zip(x.split(step), y.split(step), strict=True)


def merge_batches(drawn: Iterable[tuple[Tensor, Tensor]], many: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Join every `many` consecutive batches into one larger batch.

    Batches left over at the end, fewer than `many`, are dropped. If there are fewer than `many` in total, they form one
    batch.
    """
    iterator, is_first = iter(drawn), True
    while (group := list(islice(iterator, many))) and (is_first or len(group) == many):
        yield concatenate([x for x, _ in group]), torch.cat([y for _, y in group])
        is_first = False


def epoch_order(shard: Shard, size: int | None, generator: torch.Generator | None) -> Tensor:
    """Return the rows of one epoch in the order of its batches, (n,)."""
    if size is None or generator is None:
        return shard.index
    return shard.index.index_select(0, torch.randperm(len(shard), generator=generator))


def draw_augmentation_numbers(shard: Shard, augment: torch.Generator | None) -> Tensor | None:
    """Return the uniform random numbers in [0, 1) for the augmentation of one epoch, (n, columns).

    Row i is for the i-th sample in the order of the epoch. None if there is no augmentation.
    """
    if augment is None or not shard.random_numbers_per_sample:
        return None
    return torch.rand(len(shard), shard.random_numbers_per_sample, generator=augment).to(
        shard.x.device, non_blocking=True
    )


def _rows_per_read(x: Any, step: int, on_disk: bool) -> int:
    """Return how many rows are read at once: small batches are aligned views of one larger piece of memory."""
    if isinstance(x, Inputs):
        return step
    size = step * prod(x.shape[1:]) * x.dtype.itemsize
    # Samples on disk are read while the piece before is trained on; training begins sooner with small pieces.
    most = READ_BYTES_ON_GPU if x.device.type == "cuda" and not on_disk else READ_BYTES
    return step * max(most // size, 1) if size and size % ALIGNMENT == 0 else step


def gather_samples(x: Any, rows: Tensor, u: Tensor | None = None) -> Tensor:
    """Return x[rows]. Images stored as (n, H, W, C) blocks are gathered as blocks, so that the result is channels_last.

    Args:
        u: the random numbers of these samples from `drawn`, (B, columns).
    """
    if isinstance(x, LazyImages):
        return x.read(rows, u)
    if stored_channels_last(x):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)
