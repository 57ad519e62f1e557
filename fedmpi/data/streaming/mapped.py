"""Arrays in files, of which the system reads the pages that are asked for."""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from fedmpi.data.streaming.hdf5_rows import StoredArrays
from fedmpi.data.streaming.stream import Source

HELD = 1 << 25  # bytes read until the pages are given back
SEEN = 256  # rows that ranks compare
LOCAL_HEADER = 30  # bytes of a zip file before the name of a member


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
        found = self.array[rows]
        self.taken += found.nbytes
        if self.taken > HELD and isinstance(
            self.array, np.memmap
        ):  # else pages count as this process's memory until others need it
            self.taken = 0
            self.array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return self._shown(np.asarray(found))

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
