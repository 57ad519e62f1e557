"""Images become one array, by several threads: decoders leave Python's lock. Or they stay files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, other_spelling
from fedmpi.data.sources.pictures.decode import (
    DecodeOptions,
    OptionNeededError,
    count_channels,
    decode,
    holds_bytes,
    probe,
)
from fedmpi.data.streaming import Source, Stream, wanted

MOST_THREADS = 8
BLOCK = 256  # pictures that a thread takes at once


def read(files: Sequence[Path | bytes], options: DecodeOptions, rows: Sequence[str] = ()) -> np.ndarray | Stream:
    """Decode images, as all sources of images do. Transparent pixels, constant images and an unfit range are warned of.

    Where `data.stream` says so files stay files: each is opened here, and decoded when it is asked for.

    Args:
        files: images, .npy files (see `decode`), or the bytes of images.
        options: how each is decoded.
        rows: where each is named ("a.csv, line 7"), for messages; "" if nowhere. Bytes need it, for they have no name.

    Returns:
        (n, C, H, W) in the order of the files: uint8, or with `options.pixel_range` float32 in 0..1.

    Raises:
        UserError: with the first image that cannot be read, or is of another shape than the first one.
    """
    first, _ = _decode(files, 0, options, rows)
    look = _Look(len(files))
    options.check_channels(len(first))

    def fits(k: int, shape: tuple[int, ...]) -> None:
        if shape[0] != first.shape[0]:
            said = f"has {shape[0]} channels in all its pages, {_name(files, 0, ())} has {first.shape[0]}"
            raise UserError(f"{_name(files, k, rows)} {said}: all pictures must have as many")
        if shape != first.shape:
            said = f"is {_width_height(shape)}, {_name(files, 0, ())} is {_width_height(first.shape)}"
            raise UserError(f"{_name(files, k, rows)} {said}: give data.size, to which all pictures are scaled and cut")

    def one(k: int) -> np.ndarray:
        image, transparent = _decode(files, k, options, rows)
        fits(k, image.shape)
        look.blended[k], look.least[k], look.most[k] = transparent, image.min(), image.max()
        look.highest[k] = np.count_nonzero(image == 1) / image.size if options.pixel_range else 0
        return image

    def opened(k: int) -> None:
        try:
            shape, may_be_transparent = probe(paths[k], options)
        except Exception as error:  # as in _decode
            raise _unreadable(files, k, rows, error) from error
        fits(k, shape)
        if may_be_transparent:
            one(k)

    paths = [file for file in files if isinstance(file, Path)]
    if len(paths) == len(files) and wanted(len(files) * first.nbytes):
        _by_threads(opened, len(files))
        _report(look, files, rows, options)
        return Stream(DecodedFiles(paths, one, first.shape, first.dtype))
    try:
        images = np.empty((len(files), *first.shape), first.dtype)
    except MemoryError as error:
        gigabytes = f"{len(files) * first.nbytes / 1e9:.0f} GB"
        need = f"{len(files):,} pictures of {first.shape[1]}x{first.shape[2]}, {gigabytes}"
        raise UserError(
            f"{_name(files, 0, ())}: there is no memory for {need}; lower data.size, or set data.stream=true"
        ) from error

    def put(k: int) -> None:
        images[k] = one(k)

    _by_threads(put, len(files))
    _report(look, files, rows, options)
    return images


def channels_of_first(files: Sequence[Path | bytes], rows: Sequence[str]) -> Literal[1, 3]:
    """1 where the first image is grey, 3 where it is not. Raises UserError if it cannot be read."""
    try:
        return count_channels(files[0])
    except Exception as error:  # as in _decode
        raise _unreadable(files, 0, rows, error) from error


def warn_of_depths(files: Sequence[Path | bytes], options: DecodeOptions, rows: Sequence[str] = ()) -> None:
    """Warn if one range is given for images of 8 bits and of more, or one that images of 8 bits leave mostly unused.

    Args:
        files, options, rows: as of `read`; the files of all sites that are read here, so that it is said once.
    """
    if not isinstance(options.pixel_range, tuple) or not files:
        return
    depths = np.zeros(len(files), dtype=np.uint8)  # 0: not known

    def look(k: int) -> None:
        with suppress(Exception):  # `read` tells of a file that cannot be opened
            depths[k] = 8 if holds_bytes(files[k]) else 16

    _by_threads(look, len(files))
    low, high = options.pixel_range
    of_bytes, deeper = np.flatnonzero(depths == 8), np.flatnonzero(depths == 16)
    brightest = (255 - low) / (high - low)
    if not len(of_bytes) or (not len(deeper) and brightest >= 0.5):
        return
    found = f"{len(of_bytes)} of 8 bits, such as {_name(files, int(of_bytes[0]), rows)}"
    if len(deeper):
        found += f", and {len(deeper)} of more, such as {_name(files, int(deeper[0]), rows)}"
    warnings.warn(
        f"data.pixel_range: [{low:g}, {high:g}] is the range of all pictures, but there are {found}: 255, the largest "
        f"value of 8 bits, becomes {min(max(brightest, 0), 1):.2g}; save all of them with one depth, or say "
        "data.pixel_range: file, for the range of each",
        stacklevel=2,
    )


def _decode(
    files: Sequence[Path | bytes], k: int, options: DecodeOptions, rows: Sequence[str]
) -> tuple[np.ndarray, bool]:
    """The pixels of file k, and whether transparent ones were blended. Raises UserError, with the file."""
    try:
        return decode(files[k], options)
    except Exception as error:  # what a damaged file makes of a decoder is not to be foreseen
        raise _unreadable(files, k, rows, error) from error


class _Look:
    """Statistics of decoded images, each (n,): blended, least and largest pixel, share of pixels at 1."""

    def __init__(self, many: int) -> None:
        self.blended = np.zeros(many, dtype=bool)
        self.least = np.full(many, np.nan)  # NaN: not decoded here
        self.most = np.full(many, np.nan)
        self.highest = np.full(many, np.nan)


_Read = tuple[_Look, Sequence["Path | bytes"], Sequence[str], DecodeOptions]
_reads: ContextVar[list[_Read] | None] = ContextVar("reads", default=None)


@contextmanager
def warned_of_once() -> Iterator[None]:
    """Collect the warnings of all `read` inside, such as those of several sites, and give each once at the end."""
    reads: list[_Read] = []
    token = _reads.set(reads)
    try:
        yield
    finally:
        _reads.reset(token)
    _warn(reads)


def _report(look: _Look, files: Sequence[Path | bytes], rows: Sequence[str], options: DecodeOptions) -> None:
    reads = _reads.get()
    if reads is None:
        _warn([(look, files, rows, options)])
    else:
        reads.append((look, files, rows, options))


def _warn(reads: Sequence[_Read]) -> None:
    """Warn of images that are blended, constant or cut off by the pixel range: how many, and the first of them."""

    def of(chosen: Callable[[_Look], np.ndarray]) -> str:
        found = [(np.flatnonzero(chosen(look)), files, rows) for look, files, rows, _ in reads]
        many = sum(len(k) for k, _, _ in found)
        first = next((_name(files, int(k[0]), rows) for k, files, rows in found if len(k)), "")
        return f"{count(many, 'picture')} (the first: {first})" if many else ""

    if not reads:
        return
    options = reads[0][3]
    looks = [look for look, *_ in reads]
    least, most = (np.concatenate(each) for each in zip(*((look.least, look.most) for look in looks), strict=True))
    highest = np.concatenate([look.highest for look in looks])
    if said := of(lambda look: look.blended):
        how = f"over {options.background}; data.background names another colour"
        warnings.warn(f"data: transparent pixels of {said} are blended {how}", stacklevel=3)
    if isinstance(options.pixel_range, tuple) and not np.isnan(least).any():
        low, high = options.pixel_range
        named, remedy = f"data.pixel_range: [{low:g}, {high:g}]", "say the range that the files have, or file"
        if most.max() - least.min() < 0.1:
            said = f"all pixels become {least.min():.2g} to {most.max():.2g}, a small part of 0 to 1"
            warnings.warn(f"{named}: {said}; {remedy}", stacklevel=3)
            return
        if highest.mean() > 0.25:
            said = f"{100 * highest.mean():.0f} % of all pixels are at its upper end or beyond, and become 1"
            warnings.warn(f"{named}: {said}; {remedy}", stacklevel=3)
    if said := of(lambda look: look.least == look.most):
        warnings.warn(f"data: all pixels of {said} have one value; is the file what it should be?", stacklevel=3)


def _by_threads(do: Callable[[int], None], many: int, size: int = 0) -> None:
    """Call do(0), ..., do(many - 1) by several threads, `size` calls at a time (0: BLOCK); raises the first error."""

    def block(begin: int, end: int) -> None:
        for k in range(begin, end):
            do(k)

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="pictures") as pool:
        blocks = [*range(0, many, size or BLOCK), many]
        tasks = [pool.submit(block, begin, end) for begin, end in pairwise(blocks)]
        try:
            for task in tasks:  # in their order, so that the first mistake is the one that is reported
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _unreadable(files: Sequence[Path | bytes], k: int, rows: Sequence[str], error: Exception) -> UserError:
    row = f"{rows[k]}: " if rows and rows[k] else ""
    if isinstance(error, FileNotFoundError):
        where = "; correct the row, or data.root, below which it is looked for" if row else ""
        return UserError(f"{row}there is no picture {files[k]!s}{with_ending(files[k])}{where}")
    remedy = "" if isinstance(error, OptionNeededError) else "; mend or remove it"
    return UserError(f"{_name(files, k, rows)} cannot be read as a picture: {error}{remedy}")


def with_ending(file: Path | bytes) -> str:
    """Hint for a missing file: one of the same name with an ending, or with other case or Unicode form."""
    if isinstance(file, bytes):
        return ""
    if said := other_spelling(file):
        return said
    if not file.parent.is_dir():
        return ""
    similar = sorted(each.name for each in file.parent.iterdir() if each.stem == file.name)
    return f", but {similar[0]}: names need their ending" if similar else ""


def _name(files: Sequence[Path | bytes], k: int, rows: Sequence[str]) -> str:
    row = rows[k] if rows else ""
    if isinstance(files[k], bytes):
        return row or f"picture {k}"
    return f"{row}: {files[k]!s}" if row else str(files[k])


def _width_height(shape: tuple[int, ...]) -> str:
    return f"{shape[2]}x{shape[1]}"  # as PIL and cameras say it: width first


@final
class DecodedFiles(Source):
    """Picture files that are decoded each time they are read, by several threads."""

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

        def put(k: int) -> None:
            out[k] = self.decode(int(rows[k]))

        _by_threads(put, len(rows), -(-len(rows) // MOST_THREADS))
        return out

    def look(self, rows: np.ndarray) -> Iterator[bytes]:
        """Names and sizes of the files: to decode them all would take as long as an epoch."""
        for row in rows:
            file = self.files[row]
            yield f"{file.name} {file.stat().st_size}\n".encode()
