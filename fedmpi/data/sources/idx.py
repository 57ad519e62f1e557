"""The idx format of MNIST, plain or gzipped, read in memory: the folder may be read-only.

Big-endian header: 0x0000, type (0x08 = unsigned byte), number of dimensions, then one uint32 a dimension; then data.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError


def read_idx(path: Path, ndim: int, remedy: str) -> np.ndarray:
    """uint8 array of `ndim` dimensions. Raises UserError, naming the file, if its content contradicts its header."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
    head = 4 + 4 * ndim
    if len(data) < head or data[:4] != bytes((0, 0, 8, ndim)):
        raise UserError(
            f"{path} is not an idx file of bytes with {ndim} dimensions: it starts with {data[:4].hex()}, not "
            f"000008{ndim:02x}; {remedy}"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", ndim, offset=4))
    size = math.prod(shape)  # numpy's would wrap around at 2^64
    if len(data) - head != size:
        raise UserError(
            f"{path} is damaged: its header says {' x '.join(map(str, shape))} = {size} bytes, {len(data) - head} "
            f"follow; {remedy}"
        )
    if size == 0:
        raise UserError(f"{path} is empty: its header says {' x '.join(map(str, shape))}; {remedy}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape).copy()  # frombuffer's view is read-only
