"""Images that remain on disk: rows are read when a batch needs them, and a thread reads ahead for the next batches.

data.stream sets which data sets remain on disk: `auto` (those of more than MEMORY_LIMIT bytes), `true` (all) or `false`
(none). A data source calls `stays_on_disk` and, if it returns True, uses a Stream in place of an array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

MEMORY_LIMIT = 1 << 31  # bytes of the images of training and test part that a rank keeps in memory
PREFETCHED_BATCHES = 2  # number of batches that are read in advance
FINGERPRINT_ROWS = 256  # number of rows whose pixels are part of a fingerprint

Part = TypeVar("Part")
Result = TypeVar("Result")

_limit = ContextVar("limit", default=MEMORY_LIMIT)


@contextmanager
def use_streaming_mode(stream: bool | str) -> Iterator[None]:
    """Set which images data sources leave on disk within this context; `stream` is the value of data.stream."""
    token = _limit.set(MEMORY_LIMIT if stream == "auto" else 0 if stream else 1 << 62)
    try:
        yield
    finally:
        _limit.reset(token)


def stays_on_disk(size: int) -> bool:
    """Return whether images of `size` bytes in total remain on disk."""
    return size > _limit.get()


class DiskSource(ABC):
    """The base class of images (n, c, H, W) or volumes (n, c, D, H, W) that are read from disk."""

    shape: tuple[int, ...]  # (n, c, H, W)
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # or float32, for pixels in 0..1

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Read the rows with these numbers, (B, c, H, W) of `dtype`; raise UserError naming the file if this fails.

        Different threads may call this method, but never at the same time.
        """

    @abstractmethod
    def fingerprint(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield bytes that identify these rows, so that ranks can check that they have the same data.

        This must take at most a few seconds, however many rows there are.
        """


def _assign_rows_to_parts(parts: Sequence[Any], rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Find the parts of a concatenation that contain the given rows.

    Yields:
        A part, the row numbers within this part, and the positions of these rows in `rows`.
    """
    sizes = [part.shape[0] for part in parts]
    ends = np.cumsum(sizes)
    owner = np.searchsorted(ends, rows, side="right")
    for k in np.unique(owner).tolist():
        positions = np.flatnonzero(owner == k)
        yield parts[k], rows[positions] - (ends[k] - sizes[k]), positions


@final
class ConcatSource(DiskSource):
    """The concatenation of several DiskSources."""

    def __init__(self, parts: Sequence[DiskSource]) -> None:
        self.parts, self.dtype = parts, parts[0].dtype
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for part, own_rows, positions in _assign_rows_to_parts(self.parts, rows):
            out[positions] = part.read(own_rows)
        return out

    def fingerprint(self, rows: np.ndarray) -> Iterator[bytes]:
        for part, own_rows, _ in _assign_rows_to_parts(self.parts, rows):
            yield from part.fingerprint(own_rows)


@final
class Hdf5Arrays:
    """The concatenation of uint8 data sets in HDF5 files, whose rows can be read in any order: `stored[rows]`."""

    dtype = np.dtype(np.uint8)

    def __init__(self, parts: Sequence[Any]) -> None:
        """Concatenate h5py.Dataset objects of open files, whose rows have the same shape."""
        self.parts = parts
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for part, own_rows, positions in _assign_rows_to_parts(self.parts, rows):
            unique_rows, inverse = np.unique(own_rows, return_inverse=True)
            block = slice(int(unique_rows[0]), int(unique_rows[-1]) + 1)  # faster than a list of rows
            out[positions] = part[block if block.stop - block.start == len(unique_rows) else unique_rows][inverse]
        return out


@final
class Hdf5Source(DiskSource):
    """Images (c, H, W) or volumes (c, D, H, W) in HDF5 files.

    Args:
        array: the images or volumes as they are stored.
        axes: the order of the array's axes, such as NHWC; N stands for the rows.
    """

    def __init__(self, array: Hdf5Arrays, axes: str) -> None:
        self.array, self.axes = array, axes
        self.shape = (len(array), *self.read(np.arange(0)).shape[1:])

    def read(self, rows: np.ndarray) -> np.ndarray:
        x = self.array[rows].transpose([self.axes.index(axis) for axis in "NCDHW" if axis in self.axes])
        return x if "C" in self.axes else x[:, None]

    def fingerprint(self, rows: np.ndarray) -> Iterator[bytes]:
        yield rows.tobytes()
        yield self.read(rows[:: max(len(rows) // FINGERPRINT_ROWS, 1)]).tobytes()


@final
class Stream:
    """A selection of rows of a DiskSource that behaves like a tensor (n, c, H, W)."""

    def __init__(self, source: DiskSource, rows: np.ndarray | None = None) -> None:
        self.source = source
        self.rows = np.arange(source.shape[0]) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> Stream:
        """Select rows by a slice, row numbers or a mask, without reading them."""
        return Stream(self.source, self.rows[rows.numpy() if isinstance(rows, Tensor) else rows])

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), *self.source.shape[1:]])

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.source.dtype == np.uint8 else torch.float32

    def read(self, rows: Tensor) -> Tensor:
        """Read the given rows into memory, (B, c, H, W)."""
        return torch.from_numpy(self.source.read(self.rows[rows.cpu().numpy()]))

    def read_all(self) -> Tensor:
        """Read all rows into memory, (n, c, H, W)."""
        return self.read(torch.arange(len(self)))

    def fingerprint(self) -> Iterator[bytes]:
        """Yield bytes that identify the rows, so that ranks need not compare all pixels."""
        yield f"{tuple(self.shape)}".encode()
        yield from self.source.fingerprint(self.rows)


def concatenate_streams(streams: Sequence[Stream]) -> Stream:
    """Concatenate the rows of several streams, which remain on disk."""
    starts = np.cumsum([0, *(stream.source.shape[0] for stream in streams)])
    rows = [stream.rows + start for stream, start in zip(streams, starts, strict=False)]
    return Stream(ConcatSource([stream.source for stream in streams]), np.concatenate(rows))


def prefetch(read: Callable[[Part], Result], parts: Iterable[Part]) -> Generator[Result, None, None]:
    """Yield read(part) for each part in order, while a thread reads PREFETCHED_BATCHES parts in advance.

    If `read` fails, its error is raised when that part is due. Closing the generator ends the thread.
    """
    results: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="reading ahead") as reader:
        try:
            for part in parts:
                results.append(reader.submit(read, part))
                if len(results) > PREFETCHED_BATCHES:
                    yield results.popleft().result()
            while results:
                yield results.popleft().result()
        finally:
            for result in results:
                result.cancel()
