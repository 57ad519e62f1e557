"""Check which files of a data set are there, and fetch the missing ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest
from fedmpi.data import sources
from fedmpi.data.fetching import catalogue, http, medmnist
from fedmpi.data.fetching.catalogue import Download, Listing, Part

SETS: dict[str, Listing] = catalogue.PUBLIC | medmnist.SETS | catalogue.BY_HAND

Tell = Callable[[str], None]


@contextmanager
def progress() -> Iterator[Tell]:
    """Yield a function that shows lines `file: how far`: on a terminal one line a file, elsewhere its name once."""
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        file = text.partition(":")[0]
        if sys.stderr.isatty():
            begin = "\r\x1b[K" if file == shown or not shown else "\n"
            sys.stderr.write(begin + text)
        elif file != shown:
            sys.stderr.write(f"{file}\n")
        sys.stderr.flush()
        shown = file

    try:
        yield show
    finally:
        if shown and sys.stderr.isatty():
            sys.stderr.write("\n")


def find(name: str) -> Listing:
    if name not in SETS:
        if name == "medmnist":
            raise UserError(
                f"data: medmnist is a source of several sets; name one of them: {', '.join(medmnist.TABLE)}"
            )
        if name in sources.registry:
            said = "is a source whose files are not known here (docs/data.md says which it reads)"
            raise UserError(f"data: {name} {said}; those that are: {', '.join(sorted(SETS))}")
        raise UserError(f"data: unknown data set '{name}'; {nearest(name, SETS)}")
    return SETS[name]


def missing(part: Part, root: Path) -> str:
    """What is wrong with a part: `is missing`, `has the MD5 ...`; "" if nothing is."""
    found = next((path for path in part.paths if os.path.exists(root / path)), None)
    if found is None:
        return "is missing"
    at = root / found
    try:
        if part.files and (n := _files(at)) < part.files:
            return f"holds {n:,} of {part.files:,} files"
        if part.md5 and Path(found).name == Path(part.paths[0]).name and (has := http.digest(at)) != part.md5:
            return f"has the MD5 {has}, not {part.md5}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def check(name: str, root: Path) -> list[tuple[str, str]]:
    """(place, what is wrong with it or "") of each file and folder of the data set."""
    return [(_place(part, root), missing(part, root)) for part in find(name).parts]


def fetch(name: str, root: Path, tell: Tell) -> bool:
    """Fetch what is missing of a data set; False if nothing was.

    tell: takes lines of progress. Raises UserError where it cannot be had from here: who has no way to it (no network,
    a set behind an account) is told what to fetch and where to put it.
    """
    listing = find(name)
    bad = [part for part in listing.parts if missing(part, root)]
    if not bad:
        return False
    if not listing.downloads:
        raise UserError(f"{name} cannot be fetched by a program: {listing.by_hand}\n{_wanted(name, root)}")
    wanted = [download for download in listing.downloads if _gives_any(download, bad)]
    for download in wanted:
        to = root / download.path
        try:
            brought = bool(download.into and download.md5) and to.is_file() and http.digest(to) == download.md5
            if not brought:  # by hand
                http.get(download.urls, to, download.md5, tell)
            if download.into:
                tell(f"{to.name}: unpacking")
                unpack(to, root / download.into)
            if download.into and not brought:
                to.unlink()
        except UserError as error:
            raise UserError(f"{name} could not be fetched:\n{error}\n{_offline(name, wanted, root)}") from error
        except OSError as error:
            raise UserError(f"{name}: {error.filename or root} cannot be written: {error.strerror}") from error
    left = [part for part in bad if missing(part, root)]
    if left:
        raise UserError(f"{name}: the download lacks {_place(left[0], root)}: it {missing(left[0], root)}")
    return True


def ready(name: str, root: Path, download: bool) -> None:
    """Fetch the missing files of a data set before its source reads it, if data.download allows it."""
    if download:
        with progress() as shown:
            fetch(name, root, shown)


def advice(name: str, root: Path) -> str:
    """Remedy for the message of a source that misses a file."""
    if find(name).downloads:
        return f"correct data.root, or set data.download=true, or run `fedmpi data fetch {name} --root {root}`"
    return f"correct data.root; `fedmpi data check {name} --root {root}` says what to fetch by hand and where it goes"


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Hold a lock in `root`, so that one process of a file system downloads while the others wait for it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / ".fedmpi-download.lock").open("w")
    except OSError as error:
        raise UserError(f"data.download: {root} cannot be written to: {error.strerror}; correct data.root") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, so a killed process blocks nobody
        yield


def unpack(archive: Path, to: Path) -> None:
    """Write the files of a .zip or .tar.gz below the folder `to`; a single folder around them all is left out.

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


def _gives_any(download: Download, parts: list[Part]) -> bool:
    below = download.gives.rstrip("/") + "/"
    return any(path == download.gives or path.startswith(below) for part in parts for path in part.paths)


def _files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def _place(part: Part, root: Path) -> str:
    """Where it lies, else where it should; docs/data.md has the other places that are looked at."""
    return str(root / next((path for path in part.paths if os.path.exists(root / path)), part.paths[0]))


def _wanted(name: str, root: Path) -> str:
    listing = find(name)
    lines = [f"home: {listing.home}", f"licence: {listing.licence}", "what is missing:"]
    lines += [f"  {place} {wrong}" for place, wrong in check(name, root) if wrong]
    return "\n".join(lines)


def _offline(name: str, wanted: list[Download], root: Path) -> str:
    """Where no network is: the addresses, and where their files go."""
    lines = [f"Does this machine reach the internet? If not, run `fedmpi data fetch {name}` on one that does and copy"]
    lines += ["what it gives, or bring these by any means, and run it here again:"]
    lines += [f"  {download.urls[0]} -> {root / download.path}" for download in wanted]
    return "\n".join(lines)
