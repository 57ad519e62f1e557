"""Rows of HDF5 data sets, read when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np


@final
class StoredArrays:
    """Data sets of uint8 in HDF5 files, one after the other, in the place of an array.

    Only whole rows can be read, in any order: `stored[rows]`.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, parts: Sequence[Any]) -> None:
        """parts: h5py.Dataset, of files that stay open, with rows of one shape."""
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.shape = (int(self.ends[-1]), *parts[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        numbers = np.arange(len(self))[rows]
        out = np.empty((len(numbers), *self.shape[1:]), np.uint8)
        owner = np.searchsorted(self.ends, numbers, side="right")
        for k in np.unique(owner):
            places = np.flatnonzero(owner == k)
            some, inverse = np.unique(numbers[places] - (self.ends[k] - len(self.parts[k])), return_inverse=True)
            block = slice(int(some[0]), int(some[-1]) + 1)  # faster than a list of rows
            found = self.parts[k][block if block.stop - block.start == len(some) else some]
            out[places] = found[inverse]
        return out
