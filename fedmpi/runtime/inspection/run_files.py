"""Read files of a run directory in any state: while the run continues, after it was killed, or with damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.text import pluralize
from fedmpi.config.renamed import find_old_keys

RUN_FILES = ("identity.json", "metrics.jsonl")
SWEEP_FILE = "sweep.json"  # in the directory of a sweep: the request, the runs and their labels
RANK_FOLDERS = ("state", "audit", "trace")  # folders to which ranks other than 0 write, each on its own host
TAIL_BYTES = 1 << 20  # bytes that `tail` reads
Row = dict[str, Any]


def is_run_dir(place: Path) -> bool:
    """Return whether a directory is a run directory."""
    return any((place / name).is_file() for name in RUN_FILES)


def not_a_run_error(place: Path, lacks: str = "config.yaml") -> UserError:
    """Return the error for a directory that is not a run directory.

    Without a shared file system, only rank 0's host has the complete run directory; on other hosts the error says so.

    lacks: names of the missing files, for the message.
    """
    parts = [f"{name}/" for name in RANK_FOLDERS if (place / name).is_dir()]
    if not place.is_dir():
        problem = "is a file" if place.exists() else "does not exist"
        return UserError(f"{place} {problem}; give the directory of a run")
    if is_run_dir(place) or not parts:
        return UserError(f"{place} is not a run directory: it contains no {lacks}")
    return UserError(
        f"{place} contains only files of the ranks of this host ({', '.join(parts)}); other files of the run are in "
        "its directory on the host of rank 0. Copy them from there into this directory; or, to resume the run, start "
        "the ranks of this host as before, with checkpoint.resume=must"
    )


def check_written_by_this_version(run: Path, keys: Iterable[str]) -> None:
    """Raise UserError if a run directory was written by a version of fedmpi in which config keys had other names.

    keys: the dotted keys of the run's settings, from config.yaml or identity.json.
    """
    old = find_old_keys(keys)
    if old:
        first, *others = old
        more = f", and {pluralize(len(others), 'more key')}" if others else ""
        raise UserError(
            f"{run} was written by an earlier version of fedmpi, and this version can neither read nor resume it: its "
            f"settings have old names ({first} is {old[first]} now{more}). Use the version that wrote it (its commit "
            "is in environment.json), or train again under another name"
        )


def list_runs(place: Path) -> list[Path]:
    """Return the run directories inside a directory, such as that of a sweep, sorted by name."""
    return sorted(each for each in place.iterdir() if each.is_dir() and is_run_dir(each))


def check_directory(place: Path) -> Path:
    """Return the path if it is a readable directory; otherwise raise UserError."""
    if not place.exists():
        raise UserError(f"{place} does not exist; give the directory of a run or of a sweep")
    if not place.is_dir():
        raise UserError(f"{place} is a file; give the directory of a run or of a sweep")
    try:
        next(place.iterdir(), None)
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}") from error
    return place


def read_json_object(path: Path) -> Row | None:
    """Read the object in a JSON file; return None if the file is missing, damaged, or contains no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_last_rows(path: Path, size: int = TAIL_BYTES) -> list[Row]:
    """Read the rows in the last `size` bytes of a .jsonl file; return [] if the file cannot be read."""
    try:
        return read_jsonl(path, tail_bytes=size).rows
    except UserError:
        return []


def find_last_modified(paths: Sequence[Path]) -> float | None:
    """Return the latest modification time of the files, as a Unix time in seconds; None if no file exists."""
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def find_error_line(path: Path, size: int = 1 << 16) -> str:
    """Return the last line with "error" in a log or, if there is none, the last line; "" if the log has no lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, 2) - size, 0))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if "error" in line), lines[-1] if lines else "")
