"""Decode many images into one array with several threads (decoders release Python's lock), or keep them as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.sources.images.decode import DecodeOptions, decode_image, read_image_shape
from fedmpi.data.streaming import DiskSource, Stream, stays_on_disk

MAX_THREADS = 8
IMAGES_PER_TASK = 256  # images that a thread decodes per task

Result = TypeVar("Result")


def decode_images(
    files: Sequence[Path | bytes], options: DecodeOptions, rows: Sequence[str] = ()
) -> np.ndarray | Stream:
    """Decode images to one array; every data source of images calls this function.

    If `data.stream` applies, the images stay files: each is checked here, and decoded when a batch needs it.

    Args:
        files: images, .npy files (see `decode`), or the bytes of images.
        options: the options for decoding.
        rows: the row that lists each image ("a.csv, line 7"), for messages; "" if there is none. Needed for bytes,
            which have no file name.

    Returns:
        (n, C, H, W) in the order of the files: uint8, or with `options.pixel_range` float32 in 0..1.

    Raises:
        UserError: the first image that cannot be read, or has another shape than the first one.
    """

    def name(k: int) -> str:
        row, file = rows[k] if rows else "", files[k]
        return row or f"picture {k}" if isinstance(file, bytes) else f"{row}: {file}" if row else str(file)

    def call(function: Callable[[Any, DecodeOptions], Result], k: int) -> Result:
        try:
            return function(files[k], options)
        except FileNotFoundError as error:
            row = f"{rows[k]}: " if rows and rows[k] else ""
            where = "; correct the row, or data.root, below which it is looked for" if row else ""
            raise UserError(f"{row}there is no picture {files[k]!s}{where}") from error
        except Exception as error:  # a damaged file can raise many errors
            remedy = "" if isinstance(error, UserError) else "; mend or remove it"
            raise UserError(f"{name(k)} cannot be read as a picture: {error}{remedy}") from error

    first = call(decode_image, 0)

    def check_shape(k: int, shape: tuple[int, ...]) -> None:
        if shape != first.shape:
            sizes = f"is {shape[2]}x{shape[1]}, {name(0)} is {first.shape[2]}x{first.shape[1]}"
            raise UserError(f"{name(k)} {sizes}: give data.size, to which all pictures are scaled and cut")

    def decode_one(k: int) -> np.ndarray:
        image = call(decode_image, k)
        check_shape(k, image.shape)
        return image

    paths = [file for file in files if isinstance(file, Path)]
    if len(paths) == len(files) and stays_on_disk(len(files) * first.nbytes):
        _call_in_threads(lambda k: check_shape(k, call(read_image_shape, k)), len(files), IMAGES_PER_TASK)
        return Stream(DecodedFiles(paths, decode_one, first))
    out = np.empty((len(files), *first.shape), first.dtype)
    return _decode_all(decode_one, out, range(len(files)), IMAGES_PER_TASK)


def _decode_all(
    decode_one: Callable[[int], np.ndarray], out: np.ndarray, numbers: Sequence[int] | np.ndarray, block: int
) -> np.ndarray:
    def put(place: int) -> None:
        out[place] = decode_one(int(numbers[place]))

    _call_in_threads(put, len(out), block)
    return out


def _call_in_threads(do: Callable[[int], None], many: int, block: int) -> None:
    """Call do(0), ..., do(many - 1) in several threads, `block` calls per task; raise the first error."""

    def run(begin: int) -> None:
        for k in range(begin, min(begin + block, many)):
            do(k)

    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="pictures") as pool:
        for _ in pool.map(run, range(0, many, block)):  # results come in order; after an error the rest is cancelled
            pass


@final
class DecodedFiles(DiskSource):
    """Image files that are decoded, by several threads, each time that they are read."""

    def __init__(self, files: Sequence[Path], decode: Callable[[int], np.ndarray], first: np.ndarray) -> None:
        """Store the files and `decode`, which maps the index of a file to an array in the shape of the first one."""
        self.files, self.decode = files, decode
        self.shape, self.dtype = (len(files), *first.shape), first.dtype

    def read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        return _decode_all(self.decode, out, rows, max(-(-len(rows) // MAX_THREADS), 1))

    def fingerprint(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield names and sizes of the files, which ranks compare; decoding them would take as long as an epoch."""
        for row in rows:
            file = self.files[row]
            yield f"{file.name} {file.stat().st_size}\n".encode()
