"""Samples on disk: where rows come from, which rows, and reading them ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

AHEAD = 2  # batches that are read while one is trained on

Part = TypeVar("Part")
Found = TypeVar("Found")


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


@final
class Several(Source):
    """The pictures of several sources one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = parts
        self.ends = np.cumsum([part.shape[0] for part in parts])
        self.shape = (int(self.ends[-1]), *parts[0].shape[1:])
        self.dtype = parts[0].dtype

    def _split(self, rows: np.ndarray) -> Iterator[tuple[Source, np.ndarray, np.ndarray]]:
        """(source, its rows, their places)"""
        whose = np.searchsorted(self.ends, rows, side="right")
        for i in np.unique(whose):
            places = np.flatnonzero(whose == i)
            yield self.parts[i], rows[places] - (self.ends[i] - self.parts[i].shape[0]), places

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for part, its, places in self._split(rows):
            out[places] = part.read(its)
        return out

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        for part, its, _ in self._split(rows):
            yield from part.look(its)


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


def chained(streams: Sequence[Stream]) -> Stream:
    """The samples of several streams one after the other."""
    starts = np.cumsum([0, *(stream.source.shape[0] for stream in streams)])
    rows = [stream.rows + start for stream, start in zip(streams, starts, strict=False)]
    return Stream(Several([stream.source for stream in streams]), np.concatenate(rows))


def in_turn(read: Callable[[Part], Found], parts: Iterable[Part]) -> Generator[Found, None, None]:
    """read(part) of each part, in order, by a thread that is AHEAD parts in front of who asks.

    An error comes up when its part is asked for. Whoever stops asking ends the thread: what it has not begun is left.
    """
    waiting: deque[Future[Found]] = deque()
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
