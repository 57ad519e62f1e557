"""Check which files of a public data set are present, and download missing ones."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.data.download.catalogue import CATALOGUE, CatalogueEntry, DatasetPart, Download

TIMEOUT_S = 30.0  # seconds without receiving a byte
MAX_TRIES, RETRY_DELAY_S = 3, 1.0
CHUNK_BYTES = 1 << 20  # bytes


def find_entry(name: str) -> CatalogueEntry:
    """Return the catalogue entry of a data set. Raise UserError with similar names if it is unknown."""
    if name not in CATALOGUE:
        shown = [known for known in CATALOGUE if not known.endswith(("_64", "_128", "_224"))]
        raise UserError(f"data: no files of a data set {name!r} are listed here; {suggest_name(name, shown)}")
    return CATALOGUE[name]


def check_files(name: str, root: Path) -> list[tuple[str, str]]:
    """Return (path, problem) for each file and folder of a data set; the problem is "" if the part is complete."""
    listing = find_entry(name)
    known = {each.path: each.md5 for each in listing.downloads if not each.into}
    return [_check_part(part, root, known.get(part.paths[0])) for part in listing.parts]


def _check_part(part: DatasetPart, root: Path, md5: str | None) -> tuple[str, str]:
    """Return the path where a part is or should be, and its problem. md5: checksum of the file at the first path."""
    places = [root / path for path in part.paths]
    place = next((place for place in places if place.exists()), places[0])
    problem = ""
    try:
        if not place.exists():
            problem = "is missing"
        elif part.files and (n := sum(len(names) for _, _, names in os.walk(place))) < part.files:
            problem = f"holds {n:,} of {part.files:,} files"
        elif md5 and place.name == places[0].name and (own := _compute_md5(place)) != md5:
            problem = f"has the MD5 {own}, not {md5}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    return str(place), problem


def fetch_dataset(name: str, root: Path) -> bool:
    """Download the missing files of a data set; return whether any were missing.

    Raises UserError, with what to fetch by other means and where to put it, if this machine cannot download them.
    """
    listing = find_entry(name)
    files = check_files(name, root)
    if not any(problem for _, problem in files):
        return False
    if not listing.downloads:
        lines = [f"{name} cannot be fetched by a program: {listing.manual_steps}", f"home: {listing.home}"]
        lines += [f"licence: {listing.licence}", "what is missing:"]
        raise UserError("\n".join(lines + [f"  {place} {problem}" for place, problem in files if problem]))
    bad = {path for part, (_, problem) in zip(listing.parts, files, strict=True) if problem for path in part.paths}
    downloads = [each for each in listing.downloads if each.into or each.path in bad]
    try:
        for each in downloads:
            _fetch_file(each, root)
    except UserError as error:
        raise UserError(
            f"{name} could not be fetched:\n{error}\n{_offline_instructions(name, downloads, root)}"
        ) from error
    except OSError as error:
        raise UserError(f"{name}: {error.filename or root} cannot be written: {error.strerror}") from error
    for place, problem in check_files(name, root):
        if problem:
            raise UserError(f"{name}: the download lacks {place}: it {problem}")
    return True


def _fetch_file(wanted: Download, root: Path) -> None:
    file = root / wanted.path
    brought_by_hand = bool(wanted.into) and file.is_file() and _compute_md5(file) == wanted.md5
    if not brought_by_hand:
        download_file(wanted.urls, file, wanted.md5)
    if wanted.into:
        unpack_archive(file, root / wanted.into)
        if not brought_by_hand:
            file.unlink()


def _offline_instructions(name: str, downloads: Sequence[Download], root: Path) -> str:
    lines = [f"Does this machine reach the internet? If not, run `fedmpi data fetch {name}` on one that does and copy"]
    lines += ["what it gives, or bring these by any means, and run it here again:"]
    return "\n".join(lines + [f"  {each.urls[0]} -> {root / each.path}" for each in downloads])


def download_file(urls: Sequence[str], file: Path, md5: str) -> None:
    """Download a file from the first address that provides it with this MD5; it gets its name only when it is complete.

    Raises UserError with the problem of each address.
    """
    part, problems = file.with_name(f"{file.name}.part"), {}
    file.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(MAX_TRIES):
        time.sleep(attempt * RETRY_DELAY_S)
        for url in urls:
            try:
                _receive_file(url, part, file.name)
                received = _compute_md5(part)
                if received == md5:
                    os.replace(part, file)
                    return
                problems[url] = f"what came has the MD5 {received}, not {md5}; it was deleted"
            except (OSError, http.client.HTTPException) as error:
                problems[url] = str(getattr(error, "reason", "") or error)
            part.unlink(missing_ok=True)
    raise UserError("\n".join(f"{url}: {problem}" for url, problem in problems.items()))


def _receive_file(url: str, to: Path, name: str) -> None:
    from rich.console import Console  # imported here, because runs that download nothing need neither
    from rich.progress import wrap_file

    request = urllib.request.Request(url, headers={"User-Agent": "fedmpi", "Accept-Encoding": "identity"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, to.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        with wrap_file(answer, total, description=name, console=Console(stderr=True)) as shown:
            shutil.copyfileobj(shown, file, CHUNK_BYTES)


def _compute_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def unpack_archive(archive: Path, to: Path) -> None:
    """Unpack a .zip or .tar.gz file into the folder `to`; a single top-level folder of the archive is removed.

    Files are moved only after all have been unpacked, so that `to` never holds an incomplete file. Other files in it
    stay.
    """
    temporary = to.with_name(f"{to.name}.unpacked")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(temporary)
        else:
            with tarfile.open(archive) as packed_tar:
                # Python before 3.10.12 and 3.11.4 has no filters; the MD5 of the archive has been checked anyway.
                safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                packed_tar.extractall(temporary, **safe)  # type: ignore[arg-type]
        entries = list(temporary.iterdir())
        inner = entries[0] if len(entries) == 1 and entries[0].is_dir() else temporary
        shutil.copytree(inner, to, dirs_exist_ok=True, copy_function=os.replace)
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{archive} cannot be unpacked to {to.parent}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fetch_or_advise(name: str, root: Path, download: bool) -> str:
    """Download a data set's missing files if `download` is true; return advice for other missing files."""
    if download:
        fetch_dataset(name, root)
    if find_entry(name).downloads:
        return f"correct data.root, or set data.download=true, or run `fedmpi data fetch {name} --root {root}`"
    return f"correct data.root; `fedmpi data check {name} --root {root}` says what to fetch by hand and where it goes"


@contextmanager
def download_lock(root: Path) -> Iterator[None]:
    """Hold a lock in `root`, so that only one process on a file system downloads while others wait."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / ".fedmpi-download.lock").open("w")
    except OSError as error:
        raise UserError(f"data.download: {root} cannot be written to: {error.strerror}; correct data.root") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also if the process is killed
        yield
