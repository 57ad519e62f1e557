"""Pictures that stay on disk: rows are read when a batch asks for them, those of the next ones by a thread meanwhile.

data.stream says which sets do: `auto` those of more than LIMIT bytes, `true` all, `false` none. A data source asks
`wanted`, and where it is true gives a Stream in place of an array.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

LIMIT = 1 << 31  # bytes of pictures, of training and test part together, that a rank keeps in memory
AHEAD = 2  # batches that are read while one is trained on
MOST_PAGES = 1 << 25  # bytes read until the pages are given back
SEEN = 256  # rows that ranks compare
LOCAL_HEADER = 30  # bytes of a zip file before the name of a member

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


def _split_rows(sizes: Sequence[int], rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (part, its rows, their places in `rows`) of parts that lie one after the other, `sizes` rows each."""
    ends = np.cumsum(sizes)
    part = np.searchsorted(ends, rows, side="right")
    for k in np.unique(part).tolist():
        places = np.flatnonzero(part == k)
        yield k, rows[places] - (ends[k] - sizes[k]), places


@final
class ConcatSource(Source):
    """Concatenation of several sources."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts, self.sizes = parts, [part.shape[0] for part in parts]
        self.shape = (sum(self.sizes), *parts[0].shape[1:])
        self.dtype = parts[0].dtype

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for k, its, places in _split_rows(self.sizes, rows):
            out[places] = self.parts[k].read(its)
        return out

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        for k, its, _ in _split_rows(self.sizes, rows):
            yield from self.parts[k].look(its)


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


@final
class StoredArrays:
    """Data sets of uint8 in HDF5 files, one after the other, in the place of an array: `stored[rows]` in any order."""

    dtype = np.dtype(np.uint8)

    def __init__(self, parts: Sequence[Any]) -> None:
        """Join arrays on disk, `parts`, which are h5py.Dataset objects of open files with rows of the same shape."""
        self.parts, self.sizes = parts, [len(part) for part in parts]
        self.shape = (sum(self.sizes), *parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        numbers = np.arange(len(self))[rows]
        out = np.empty((len(numbers), *self.shape[1:]), np.uint8)
        for k, its, places in _split_rows(self.sizes, numbers):
            some, inverse = np.unique(its, return_inverse=True)
            block = slice(int(some[0]), int(some[-1]) + 1)  # faster than a list of rows
            out[places] = self.parts[k][block if block.stop - block.start == len(some) else some][inverse]
        return out


@final
class Mapped(Source):
    """A uint8 array of images or volumes in a file: mapped into memory, or in HDF5.

    axes: N, the rows, then C, D, H and W in the order of the array; shown as (n, C, H, W), (n, C, D, H, W).
    """

    def __init__(self, array: np.memmap[Any, np.dtype[np.uint8]] | StoredArrays, axes: str = "NCHW") -> None:
        self.array, self.axes, self.taken = array, axes, 0
        self.shape = (len(array), *self._shown(array[:0]).shape[1:])

    def _shown(self, x: np.ndarray) -> np.ndarray:
        x = x.transpose([self.axes.index(axis) for axis in "NCDHW" if axis in self.axes])
        return x if "C" in self.axes else x[:, None]

    def read(self, rows: np.ndarray) -> np.ndarray:
        x = self.array[rows]
        self.taken += x.nbytes
        if self.taken > MOST_PAGES and isinstance(self.array, np.memmap):
            # Else pages count as this process's memory until others need it.
            self.taken = 0
            self.array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return self._shown(np.asarray(x))

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        some = rows[:: max(len(rows) // SEEN, 1)]
        yield rows.tobytes()
        yield self.read(some).tobytes()


def in_archive(path: Path, member: str) -> np.memmap[Any, np.dtype[np.uint8]] | None:
    """The array `member` of a .npz file, mapped; None if it is compressed, or no images or volumes of uint8 in
    C order."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        info = archive.getinfo(f"{member}.npy")
        if info.compress_type != zipfile.ZIP_STORED:
            return None
        file.seek(info.header_offset)
        name, extra = struct.unpack("<HH", file.read(LOCAL_HEADER)[26:])
        file.seek(info.header_offset + LOCAL_HEADER + name + extra)
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        if fortran or dtype != np.uint8 or len(shape) not in (3, 4, 5) or info.file_size < int(np.prod(shape)):
            return None
        mapped = np.memmap(path, np.uint8, "r", file.tell(), shape)
    mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return mapped


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
