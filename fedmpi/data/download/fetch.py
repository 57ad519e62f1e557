"""Check which files of a public data set are present, and download the missing ones."""

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

TIMEOUT_S = 30.0  # longest time without receiving a byte
MAX_TRIES, RETRY_DELAY_S = 3, 1.0
CHUNK_BYTES = 1 << 20  # bytes


def find_entry(name: str) -> CatalogueEntry:
    """Return the catalogue entry of a data set; raise UserError, which suggests similar names, if there is none."""
    if name not in CATALOGUE:
        suggestions = [name_of_set for name_of_set in CATALOGUE if not name_of_set.endswith(("_64", "_128", "_224"))]
        raise UserError(f"data: unknown data set {name!r}; {suggest_name(name, suggestions)}")
    return CATALOGUE[name]


def check_files(name: str, root: Path) -> list[tuple[str, str]]:
    """Check each file and folder of a data set.

    Returns:
        (path, problem) for each file and folder; the problem is "" if there is none.
    """
    listing = find_entry(name)
    md5_by_path = {each.path: each.md5 for each in listing.downloads if not each.into}
    return [_check_part(part, root, md5_by_path.get(part.paths[0])) for part in listing.parts]


def _check_part(part: DatasetPart, root: Path, md5: str | None) -> tuple[str, str]:
    """Return where a file or folder is or should be, and what is wrong with it; "" if nothing is wrong.

    md5: the checksum that a file at the first of the possible paths must have; None: checksums are not compared.
    """
    candidates = [root / path for path in part.paths]
    path = next((path for path in candidates if path.exists()), candidates[0])
    problem = ""
    try:
        if not path.exists():
            problem = "is missing"
        elif part.files and (n := sum(len(names) for _, _, names in os.walk(path))) < part.files:
            problem = f"contains only {n:,} of {part.files:,} files"
        elif md5 and path.name == candidates[0].name and (actual := _compute_md5(path)) != md5:
            problem = f"has the MD5 checksum {actual} instead of {md5}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    return str(path), problem


def fetch_dataset(name: str, root: Path) -> bool:
    """Download the missing files of a data set; return whether any were missing.

    Raises UserError if they cannot be downloaded here; the message explains how to obtain them and where to put them.
    """
    listing = find_entry(name)
    files = check_files(name, root)
    if not any(problem for _, problem in files):
        return False
    if not listing.downloads:
        lines = [f"{name} cannot be downloaded automatically: {listing.manual_steps}", f"home: {listing.home}"]
        lines += [f"licence: {listing.licence}", "files:"]
        raise UserError("\n".join(lines + [f"  {path} {problem}" for path, problem in files if problem]))
    bad = {path for part, (_, problem) in zip(listing.parts, files, strict=True) if problem for path in part.paths}
    downloads = [each for each in listing.downloads if each.into or each.path in bad]
    try:
        for each in downloads:
            _fetch_file(each, root)
    except UserError as error:
        raise UserError(
            f"{name} could not be downloaded:\n{error}\n{_offline_instructions(name, downloads, root)}"
        ) from error
    except OSError as error:
        raise UserError(f"{name}: cannot write {error.filename or root}: {error.strerror}") from error
    for path, problem in check_files(name, root):
        if problem:
            raise UserError(
                f"{name}: after the download, {path} {problem}; run `fedmpi data fetch {name} --root {root}` again"
            )
    return True


def _fetch_file(download: Download, root: Path) -> None:
    """Download one file, and unpack it if it is an archive; an archive that is already in `root` is not downloaded."""
    file = root / download.path
    is_archive_present = bool(download.into) and file.is_file() and _compute_md5(file) == download.md5
    if not is_archive_present:
        download_file(download.urls, file, download.md5)
    if download.into:
        unpack_archive(file, root / download.into)
        if not is_archive_present:
            file.unlink()


def _offline_instructions(name: str, downloads: Sequence[Download], root: Path) -> str:
    """Return instructions for a machine without internet access."""
    lines = [
        f"If this machine has no internet access, run `fedmpi data fetch {name}` on another machine and copy the files,"
    ]
    lines += ["or download these files by other means, and run the command on this machine again:"]
    return "\n".join(lines + [f"  {each.urls[0]} -> {root / each.path}" for each in downloads])


def download_file(urls: Sequence[str], file: Path, md5: str) -> None:
    """Download a file from the first URL that provides it with this MD5 checksum.

    The file gets its name only after the download is complete. If all URLs fail, UserError is raised; its message gives
    the reason for each URL.
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
                problems[url] = f"the file has the MD5 checksum {received} instead of {md5}, and was deleted"
            except (OSError, http.client.HTTPException) as error:
                problems[url] = str(getattr(error, "reason", "") or error)
            part.unlink(missing_ok=True)
    raise UserError("\n".join(f"{url}: {problem}" for url, problem in problems.items()))


def _receive_file(url: str, to: Path, name: str) -> None:
    """Download a URL to a file, with a progress bar. name: the label of the bar."""
    from rich.console import Console  # imported here, because only downloads need them
    from rich.progress import wrap_file

    request = urllib.request.Request(url, headers={"User-Agent": "fedmpi", "Accept-Encoding": "identity"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, to.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        with wrap_file(answer, total, description=name, console=Console(stderr=True)) as stream:
            shutil.copyfileobj(stream, file, CHUNK_BYTES)


def _compute_md5(path: Path) -> str:
    """Return the MD5 checksum of a file."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def unpack_archive(archive: Path, to: Path) -> None:
    """Unpack a .zip or .tar.gz file into the folder `to`.

    If the archive contains only a single folder, the content of that folder is unpacked instead. Files are moved to
    `to` only after all of them have been unpacked, so that `to` never contains an incomplete file. Other files in `to`
    are not changed.
    """
    temporary = to.with_name(f"{to.name}.unpacked")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(temporary)
        else:
            with tarfile.open(archive) as packed_tar:
                # Python before 3.10.12 and 3.11.4 has no filters; the checksum of the archive was verified anyway.
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
    """Download missing files of a data set if `download` is true; return advice for errors about missing files."""
    if download:
        fetch_dataset(name, root)
    if find_entry(name).downloads:
        return f"correct data.root, set data.download: true, or run `fedmpi data fetch {name} --root {root}`"
    return f"correct data.root; `fedmpi data check {name} --root {root}` shows what to download and where to put it"


@contextmanager
def download_lock(root: Path) -> Iterator[None]:
    """Context manager: hold a lock in `root`, so that only one process downloads at a time and the others wait."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / ".fedmpi-download.lock").open("w")
    except OSError as error:
        problem = "is a file" if root.is_file() else f"is not writable: {error.strerror}"
        raise UserError(f"data.root: {root} {problem}; set data.root to a writable directory") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also if the process is killed
        yield
