"""Pictures that stay on disk: rows are read when a batch asks for them, those of the next ones by a thread meanwhile.

data.stream says which sets do: `auto` those of more than LIMIT bytes, `true` all, `false` none. A data source asks
`wanted`, and where it is true gives a Stream in place of an array.
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

LIMIT = 1 << 31  # bytes of pictures, of training and test part together, that a rank keeps in memory
AHEAD = 2  # batches that are read while one is trained on
SEEN = 256  # rows that ranks compare

Part = TypeVar("Part")
Result = TypeVar("Result")

_limit = ContextVar("limit", default=LIMIT)


@contextmanager
def choosing(stream: bool | str) -> Iterator[None]:
    """Set which pictures stay on disk, as `data.stream` says, while sources are read."""
    token = _limit.set(LIMIT if stream == "auto" else 0 if stream else 1 << 62)
    try:
        yield
    finally:
        _limit.reset(token)


def wanted(size: int) -> bool:
    """Whether pictures of so many bytes stay on disk."""
    return size > _limit.get()


class Source(ABC):
    """n pictures (c, H, W), or volumes (c, D, H, W), that lie somewhere else than in memory."""

    shape: tuple[int, ...]  # (n, c, H, W)
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # or float32: pixels in 0..1

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """(B, c, H, W) of `dtype`, a copy. Called by one thread after another. Raises UserError, with the file."""

    @abstractmethod
    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        """What these rows are known by, read in seconds however many they are: ranks compare it."""


def _split_rows(parts: Sequence[Any], rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Yield (part, its rows, their places in `rows`) of parts that lie one after the other."""
    sizes = [part.shape[0] for part in parts]
    ends = np.cumsum(sizes)
    owner = np.searchsorted(ends, rows, side="right")
    for k in np.unique(owner).tolist():
        places = np.flatnonzero(owner == k)
        yield parts[k], rows[places] - (ends[k] - sizes[k]), places


@final
class ConcatSource(Source):
    """Concatenation of several sources."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts, self.dtype = parts, parts[0].dtype
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for part, own, places in _split_rows(self.parts, rows):
            out[places] = part.read(own)
        return out

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        for part, own, _ in _split_rows(self.parts, rows):
            yield from part.look(own)


@final
class StoredArrays:
    """Data sets of uint8 in HDF5 files, one after the other, in the place of an array: `stored[rows]` in any order."""

    dtype = np.dtype(np.uint8)

    def __init__(self, parts: Sequence[Any]) -> None:
        """Join arrays on disk, `parts`, which are h5py.Dataset objects of open files with rows of the same shape."""
        self.parts = parts
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for part, own, places in _split_rows(self.parts, rows):
            some, inverse = np.unique(own, return_inverse=True)
            block = slice(int(some[0]), int(some[-1]) + 1)  # faster than a list of rows
            out[places] = part[block if block.stop - block.start == len(some) else some][inverse]
        return out


@final
class ArraySource(Source):
    """Images or volumes in HDF5.

    axes: N, the rows, then C, D, H and W in the order of the array; shown as (n, C, H, W), (n, C, D, H, W).
    """

    def __init__(self, array: StoredArrays, axes: str) -> None:
        self.array, self.axes = array, axes
        self.shape = (len(array), *self.read(np.arange(0)).shape[1:])

    def read(self, rows: np.ndarray) -> np.ndarray:
        x = self.array[rows].transpose([self.axes.index(axis) for axis in "NCDHW" if axis in self.axes])
        return x if "C" in self.axes else x[:, None]

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        yield rows.tobytes()
        yield self.read(rows[:: max(len(rows) // SEEN, 1)]).tobytes()


@final
class Stream:
    """Rows of a source, in the place of a tensor (n, c, H, W)."""

    def __init__(self, source: Source, rows: np.ndarray | None = None) -> None:
        self.source = source
        self.rows = np.arange(source.shape[0]) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> Stream:
        """rows: a slice, numbers or a mask."""
        return Stream(self.source, self.rows[rows.numpy() if isinstance(rows, Tensor) else rows])

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), *self.source.shape[1:]])

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.source.dtype == np.uint8 else torch.float32

    def read(self, rows: Tensor) -> Tensor:
        """(B, c, H, W)"""
        return torch.from_numpy(self.source.read(self.rows[rows.cpu().numpy()]))

    def all(self) -> Tensor:
        """(n, c, H, W), in memory"""
        return self.read(torch.arange(len(self)))

    def look(self) -> Iterator[bytes]:
        """What stands for all its numbers where ranks compare their data."""
        yield f"{tuple(self.shape)}".encode()
        yield from self.source.look(self.rows)


def concatenate_streams(streams: Sequence[Stream]) -> Stream:
    """Concatenate the samples of several streams."""
    starts = np.cumsum([0, *(stream.source.shape[0] for stream in streams)])
    rows = [stream.rows + start for stream, start in zip(streams, starts, strict=False)]
    return Stream(ConcatSource([stream.source for stream in streams]), np.concatenate(rows))


def prefetch(read: Callable[[Part], Result], parts: Iterable[Part]) -> Generator[Result, None, None]:
    """Yield read(part) of each part in order; a thread reads AHEAD parts in advance.

    An error is raised when its part is asked for. Closing the generator ends the thread.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="reading ahead") as reader:
        try:
            for part in parts:
                waiting.append(reader.submit(read, part))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.cancel()
