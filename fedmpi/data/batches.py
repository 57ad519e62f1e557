"""The samples of each client, and their division into mini-batches.

The order of the samples in an epoch is drawn on the CPU, so that it is the same on all devices.
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

# Bytes of samples that are read from memory at once: on a CPU they fit into its cache; on a GPU one kernel gathers
# several batches.
READ_BYTES, READ_BYTES_ON_GPU = 1 << 18, 1 << 24
ALIGNMENT = 64  # bytes, the alignment of torch's allocator

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Shard:
    """The samples of one client: row numbers of tensors x and y, which several clients may share."""

    x: Any  # samples (rows, ...): tensor, LazyImages, or Inputs (several tensors by name)
    y: Tensor  # targets (rows, ...)
    index: Tensor  # row numbers of the client, (n,) int64, always on the CPU

    def __len__(self) -> int:
        return self.index.shape[0]  # faster than len(self.index)

    @property
    def random_numbers_per_sample(self) -> int:
        """The number of uniform random numbers that the augmentation of one sample needs."""
        return self.x.pipeline.random_numbers if isinstance(self.x, LazyImages) else 0


class LazyClientMapping(Mapping[int, T]):
    """A mapping from clients 0..N-1 to values computed on access, because most clients may never be sampled."""

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


class ShardsOfAllClients(LazyClientMapping[Shard]):
    """The training or test data of all clients, each of which owns some rows of the shared tensors x and y.

    Args:
        x: the samples of all clients, (n, ...).
        y: the targets of these samples, (n, ...).
        rows: the row numbers of each client, (n_k,) int64 arrays or tensors.
    """

    def __init__(self, x: Any, y: Tensor, rows: Sequence[Any] | Partition | LazyClientMapping[Any]) -> None:
        super().__init__(len(rows), lambda k: Shard(x, y, torch.as_tensor(rows[k])))
        self.x, self.y, self.rows = x, y, rows


def map_samples_and_targets(
    shards: Mapping[K, Shard], x: Callable[[Any], Any], y: Callable[[Tensor], Tensor] = lambda y: y
) -> Mapping[K, Shard]:
    """Return copies of shards after applying the function x to their samples and the function y to their targets."""
    if isinstance(shards, ShardsOfAllClients):
        return ShardsOfAllClients(x(shards.x), y(shards.y), shards.rows)  # type: ignore[return-value]
    return {k: Shard(x(shard.x), y(shard.y), shard.index) for k, shard in shards.items()}


def iter_samples_once_if_shared(shards: Mapping[int, Shard]) -> Iterator[tuple[int, Any, Tensor]]:
    """Yield (client, x, y) for each client, or only for client 0 if all clients share the tensors x and y."""
    if isinstance(shards, ShardsOfAllClients):
        return iter([(0, shards.x, shards.y)])
    return ((k, shard.x, shard.y) for k, shard in shards.items())


def merge_shards(shards: Mapping[int, Shard]) -> Shard:
    """Return one shard with the rows of all clients in ascending order. All shards must share the same x and y."""
    if isinstance(shards, ShardsOfAllClients) and isinstance(shards.rows, Partition):
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
    """Yield the batches (x, y) of one epoch, (B, ...) each.

    Args:
        shard: the samples of a client.
        size: number of rows per batch; None: all rows in one batch, in the order of `shard.index`.
        generator: draws the order of the rows; None (used in evaluations): the order of `shard.index`.
        drop_last: leave out the last batch if it has fewer than `size` rows. A client with fewer than `size` rows then
            has no batch: it takes no step, and its update is zero.
        augment: draws the random numbers of augmentation (data.augment); None: images are not augmented.
    """
    n, index = len(shard), epoch_order(shard, size, generator)
    step = size or max(n, 1)
    stop = n - n % step if drop_last else n
    if not stop:
        return
    index_on_device = index.to(shard.x.device, non_blocking=True)  # one copy per epoch
    on_disk = isinstance(shard.x, LazyImages) and isinstance(shard.x.stored, Stream)
    u, rows_per_read = draw_augmentation_numbers(shard, augment), _rows_per_read(shard.x, step, on_disk)
    # The thread that reads ahead uses the index on the CPU, because a copy from the GPU would wait for queued training.
    with (
        closing(prefetch(shard.x.read_stored, index[:stop].split(rows_per_read))) if on_disk else nullcontext() as read
    ):
        for begin in range(0, stop, rows_per_read):
            rows = index_on_device[begin : min(begin + rows_per_read, stop)]
            v = None if u is None else u[begin : begin + len(rows)]
            x = gather_samples(shard.x, rows, v) if read is None else shard.x.to_inputs(next(read), v)
            y = shard.y.index_select(0, rows)
            if rows_per_read == step:
                yield x, y
            else:
                yield from zip(x.split(step), y.split(step), strict=True)


def merge_batches(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Merge every `count` consecutive batches into one larger batch.

    An incomplete group of batches at the end is dropped, unless it is the only group.
    """
    iterator, is_first = iter(batches), True
    while (group := list(islice(iterator, count))) and (is_first or len(group) == count):
        yield concatenate([x for x, _ in group]), torch.cat([y for _, y in group])
        is_first = False


def epoch_order(shard: Shard, size: int | None, generator: torch.Generator | None) -> Tensor:
    """Return the row numbers of one epoch in the order of its batches, (n,); see `batches` for the arguments."""
    if size is None or generator is None:
        return shard.index
    return shard.index.index_select(0, torch.randperm(len(shard), generator=generator))


def draw_augmentation_numbers(shard: Shard, augment: torch.Generator | None) -> Tensor | None:
    """Draw the uniform random numbers in [0, 1) for the augmentation of one epoch.

    Returns:
        One row per sample in the order of the epoch, (n, random_numbers_per_sample); None without augmentation.
    """
    if augment is None or not shard.random_numbers_per_sample:
        return None
    return torch.rand(len(shard), shard.random_numbers_per_sample, generator=augment).to(
        shard.x.device, non_blocking=True
    )


def _rows_per_read(x: Any, step: int, on_disk: bool) -> int:
    """Return how many rows to read at once: those of one batch or of several batches.

    Several batches are read at once if each of them then begins at an aligned memory address.

    Args:
        x: the samples.
        step: number of rows per batch.
        on_disk: whether the samples are on disk. If so, fewer rows are read at once, so that training begins sooner.
    """
    if isinstance(x, Inputs):
        return step
    size = step * prod(x.shape[1:]) * x.dtype.itemsize
    # Samples on disk are read while the previous ones are trained on, so that small reads let training begin sooner.
    max_bytes = READ_BYTES_ON_GPU if x.device.type == "cuda" and not on_disk else READ_BYTES
    return step * max(max_bytes // size, 1) if size and size % ALIGNMENT == 0 else step


def gather_samples(x: Any, rows: Tensor, u: Tensor | None = None) -> Tensor:
    """Return the samples x[rows], (B, ...), in the memory format of x.

    Args:
        x: the samples of all clients, a tensor or LazyImages.
        rows: row numbers, (B,).
        u: the random numbers of these samples from `draw_augmentation_numbers`; None: no augmentation.
    """
    if isinstance(x, LazyImages):
        return x.read(rows, u)
    if stored_channels_last(x):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)
