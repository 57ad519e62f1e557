"""Decode many images into one array with several threads, or leave them on disk until a batch needs them."""

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
IMAGES_PER_TASK = 256  # number of images that a thread decodes per task

Result = TypeVar("Result")


def decode_images(
    files: Sequence[Path | bytes], options: DecodeOptions, rows: Sequence[str] = ()
) -> np.ndarray | Stream:
    """Decode images into one array, with several threads.

    If images stay on disk (data.stream), only their headers are checked here, and each image is decoded when a batch
    needs it.

    Args:
        files: image files or .npy files (see `decode_image`), or the bytes of images.
        options: the options for decoding.
        rows: the row that lists each image ("a.csv, line 7"), for messages; "" if there is none. Required for bytes,
            which have no file name.

    Returns:
        (n, C, H, W) in the order of the files: uint8, or float32 in 0..1 if `options` sets a pixel range.

    Raises:
        UserError: an image cannot be read, or does not have the shape of the first one; the message names it.
    """

    def name(k: int) -> str:
        row, file = rows[k] if rows else "", files[k]
        return row or f"image {k}" if isinstance(file, bytes) else f"{row}: {file}" if row else str(file)

    def call(function: Callable[[Any, DecodeOptions], Result], k: int) -> Result:
        try:
            return function(files[k], options)
        except FileNotFoundError as error:
            row = f"{rows[k]}: " if rows and rows[k] else ""
            remedy = "; correct the row, or data.root, to which paths are relative" if row else ""
            raise UserError(f"{row}image {files[k]!s} not found{remedy}") from error
        except Exception as error:  # a damaged file can raise many errors
            remedy = "" if isinstance(error, UserError) else "; correct or remove the file"
            raise UserError(f"{name(k)} cannot be read as an image: {error}{remedy}") from error

    first = call(decode_image, 0)

    def check_shape(k: int, shape: tuple[int, ...]) -> None:
        if shape != first.shape:
            sizes = f"has {shape[2]}x{shape[1]} pixels, but {name(0)} has {first.shape[2]}x{first.shape[1]}"
            raise UserError(f"{name(k)} {sizes}; set data.size to scale and crop all images to one size")

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
    decode_one: Callable[[int], np.ndarray], out: np.ndarray, indices: Sequence[int] | np.ndarray, block: int
) -> np.ndarray:
    """Decode the images with these indices into `out` in several threads, `block` images per task; return `out`."""

    def decode_to(position: int) -> None:
        out[position] = decode_one(int(indices[position]))

    _call_in_threads(decode_to, len(out), block)
    return out


def _call_in_threads(function: Callable[[int], None], calls: int, block: int) -> None:
    """Call function(0), ..., function(calls - 1) in several threads, `block` calls per task; raise the first error."""

    def call_block(begin: int) -> None:
        for k in range(begin, min(begin + block, calls)):
            function(k)

    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="images") as pool:
        for _ in pool.map(
            call_block, range(0, calls, block)
        ):  # results come in order; an error cancels the remaining tasks
            pass


@final
class DecodedFiles(DiskSource):
    """Image files that several threads decode each time they are read."""

    def __init__(self, files: Sequence[Path], decode: Callable[[int], np.ndarray], first: np.ndarray) -> None:
        """Store the arguments; nothing is decoded yet.

        Args:
            files: the paths of the image files.
            decode: a function that returns the image with a given index.
            first: the first image; all images must have its shape and dtype.
        """
        self.files, self.decode = files, decode
        self.shape, self.dtype = (len(files), *first.shape), first.dtype

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Decode the images with these indices."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        return _decode_all(self.decode, out, rows, max(-(-len(rows) // MAX_THREADS), 1))

    def fingerprint(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield the name and size of each file with these indices.

        The pixels are not used, because decoding all files would take as long as an epoch.
        """
        for row in rows:
            file = self.files[row]
            yield f"{file.name} {file.stat().st_size}\n".encode()
