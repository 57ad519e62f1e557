"""Picture files become one array, by several threads: decoders leave Python's lock. Or they stay files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedmpi.common.errors import UserError
from fedmpi.data.streaming import wanted
from fedmpi.data.streaming.decoded import Decoded
from fedmpi.data.streaming.stream import Stream

MODES = {1: "L", 3: "RGB"}
MOST_THREADS = 8
BLOCK = 256  # pictures that a thread takes at once


def is_picture(file: Path) -> bool:
    """By its ending; hidden files (._dog.jpg of a Mac) are none."""
    return file.suffix.lower() in Image.registered_extensions() and not file.name.startswith(".")


def read(files: Sequence[Path], channels: int, size: int | None, rows: Sequence[str] = ()) -> np.ndarray | Stream:
    """(n, channels, H, W) uint8, in the order of the files; channels: 1 grey, 3 colour. A .npy is (H, W) or (H, W, 3)
    numbers 0..255. Where `data.stream` says so they stay files, of which each is opened here and decoded when it is
    asked for.

    size: each is scaled and cut at its centre to size x size; None: they are taken as they are, all of one size.
    rows: where each file is named, for messages.
    Raises UserError with the first file that cannot be read, or is of another size.
    """
    first = _picture(files[0], channels, size, _row(rows, 0))

    def fits(k: int, shape: tuple[int, ...]) -> None:
        if shape != first.shape:
            raise UserError(
                f"{_row(rows, k)}{files[k]} is {_look(shape)}, {files[0]} is {_look(first.shape)}: give data.size, to "
                "which all pictures are scaled and cut"
            )

    def one(k: int) -> np.ndarray:
        image = _picture(files[k], channels, size, _row(rows, k))
        fits(k, image.shape)
        return image

    def opened(k: int) -> None:
        width, height = _opened(files[k], _row(rows, k))
        if size is None:
            fits(k, (channels, height, width))

    if wanted(len(files) * first.size):
        _by_threads(opened, len(files))
        return Stream(Decoded(files, one, first.shape))
    try:
        images = np.empty((len(files), *first.shape), np.uint8)
    except MemoryError as error:
        need = f"{len(files):,} pictures of {first.shape[1]}x{first.shape[2]}, {len(files) * first.size / 1e9:.0f} GB"
        raise UserError(
            f"{files[0].parent}: there is no memory for {need}; lower data.size, or set data.stream=true"
        ) from error

    def put(k: int) -> None:
        images[k] = one(k)

    _by_threads(put, len(files))
    return images


def _by_threads(do: Callable[[int], None], many: int) -> None:
    """do(0), ..., do(many - 1); raises the first error, by number."""

    def block(begin: int, end: int) -> None:
        for k in range(begin, end):
            do(k)

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="pictures") as pool:
        blocks = [*range(0, many, BLOCK), many]
        tasks = [pool.submit(block, begin, end) for begin, end in pairwise(blocks)]
        try:
            for task in tasks:  # in their order, so that the first mistake is the one told
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _opened(file: Path, row: str) -> tuple[int, int]:
    """(width, height) of a picture, of which only the header is read."""
    try:
        with _array(file) if file.suffix == ".npy" else Image.open(file) as image:
            _check_mode(image)
            return image.size
    except Exception as error:  # as in _picture
        raise _unreadable(file, row, error) from error


def _check_mode(image: Image.Image) -> None:
    if image.mode[0] in "IF":  # 16 or 32 bits: PIL would cut them off at 255
        raise ValueError(f"its pixels are of mode {image.mode}, not of 8 bits")


def _picture(file: Path, channels: int, size: int | None, row: str) -> np.ndarray:
    try:
        with _array(file) if file.suffix == ".npy" else Image.open(file) as image:
            _check_mode(image)
            shown = image.convert(MODES[channels])
            pixel = np.asarray(shown if size is None else ImageOps.fit(shown, (size, size), Image.Resampling.BILINEAR))
    except Exception as error:  # what a damaged file makes of a decoder is not to be foreseen
        raise _unreadable(file, row, error) from error
    return pixel[None] if channels == 1 else pixel.transpose(2, 0, 1)


def _unreadable(file: Path, row: str, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        where = "; correct the row, or data.root, below which it is looked for" if row else ""
        return UserError(f"{row}there is no picture {file}{where}")
    return UserError(f"{row}{file} cannot be read as a picture: {error}; mend or remove it")


def _array(file: Path) -> Image.Image:
    array = np.load(file, allow_pickle=False)
    array = array[..., :3] if array.ndim == 3 else array
    if array.dtype.kind not in "uif" or array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,)):
        raise ValueError(f"it is {array.dtype} of shape {array.shape}; (H, W) or (H, W, 3) numbers are needed")
    if not (array.min() >= 0 and array.max() <= 255) or (array.max() <= 1 and (array % 1).any()):
        raise ValueError(f"it holds {array.min()}..{array.max()}; pixels are 0..255")
    return Image.fromarray(array.astype(np.uint8))


def _row(rows: Sequence[str], k: int) -> str:
    return f"{rows[k]}: " if rows and rows[k] else ""


def _look(shape: tuple[int, ...]) -> str:
    return f"{shape[2]}x{shape[1]}"  # as PIL and cameras say it: width first
