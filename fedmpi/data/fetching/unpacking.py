"""Archives: .zip and .tar.gz, unpacked beside and moved into place when all is there."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from fedmpi.common.errors import UserError


def unpack(archive: Path, to: Path) -> None:
    """The archive's files below the folder `to`; a single folder around them all is left out.

    Files alone are written, below `to` alone: links, devices and names that lead out are refused. They are unpacked
    into NAME.unpacked and moved when all are there, so that what lies in `to` is whole.
    """
    beside = to.with_name(f"{to.name}.unpacked")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name, content in _members(archive):
            place = beside / _inside(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            with content, place.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"{archive} cannot be unpacked to {to.parent}: {error}") from error
    _move(_core(beside), to)
    shutil.rmtree(beside, ignore_errors=True)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    yield entry.filename, packed.open(entry)
        return
    with tarfile.open(archive, "r:*") as tape:
        for member in tape:
            content = tape.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content
            elif not member.isdir():
                raise tarfile.TarError(f"it holds {member.name!r}, which is neither a file nor a folder")


def _inside(name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it holds {name!r}, which leads out of its folder")
    return Path(*path.parts)


def _core(folder: Path) -> Path:
    """`folder`, or what is inside the one folder in it."""
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


def _move(folder: Path, to: Path) -> None:
    """All at once, or file by file where the target exists: a set that is mended."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if not to.exists():
        os.replace(folder, to)
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            place = to / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
