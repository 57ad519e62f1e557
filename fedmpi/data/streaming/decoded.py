"""Picture files that are decoded each time they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np

from fedmpi.data.streaming.stream import Source

MOST_THREADS = 8


@final
class Decoded(Source):
    """Files, and what makes a picture of one. Several threads do it: decoders leave Python's lock while they work."""

    def __init__(
        self,
        files: Sequence[Path],
        decode: Callable[[int], np.ndarray],
        shape: tuple[int, ...],
        dtype: np.dtype[Any] = Source.dtype,
    ) -> None:
        """decode: number of a file -> (c, H, W) of this shape and type, or UserError with the file's name."""
        self.files, self.decode, self.shape, self.dtype = files, decode, (len(files), *shape), dtype

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)

        def put(begin: int, end: int) -> None:
            for k in range(begin, end):
                out[k] = self.decode(int(rows[k]))

        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), max(len(rows), 1))
        cuts = np.linspace(0, len(rows), threads + 1).astype(int).tolist()
        with ThreadPoolExecutor(threads, thread_name_prefix="decoding") as pool:
            for task in [pool.submit(put, begin, end) for begin, end in pairwise(cuts)]:
                task.result()
        return out

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        """Names and sizes of the files: to decode them all would take as long as an epoch."""
        for row in rows:
            file = self.files[row]
            yield f"{file.name} {file.stat().st_size}\n".encode()
