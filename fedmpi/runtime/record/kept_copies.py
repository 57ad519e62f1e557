"""Copies of the user's own code in a run directory (plugins.py), in place of files that have moved, gone or changed.

This imports no torch and none of the code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.registry import is_file


def moved(run_dir: Path, names: Iterable[str]) -> dict[str, str]:
    """Name of a plug-in -> the name of its copy, where the file is not what it was when the run was made.

    names: `file.py:Name` or `package.module:Name`. Raises UserError for a copy that was changed itself.
    """
    known = _known(run_dir)
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        place, _, attribute = name.rpartition(":")
        row = next((row for row in known if _is(place, row["file"], is_file(name))), None)
        file = _origin(place, is_file(name))
        if row is None or (file is not None and _digest(file) == row["sha256"]):
            continue
        copy = run_dir.absolute() / row["copy"]
        if not copy.is_file() or _digest(copy) != row["sha256"]:
            what = "has changed" if copy.is_file() else "is missing"
            raise UserError(
                f"{copy} {what}: it is the copy of {row['file']} that this run was made with (SHA-256 "
                f"{row['sha256'][:12]}...), and that file is not there either; put one of them back"
            )
        if file is not None:
            warnings.warn(f"{file} has changed since this run was made; its copy {copy} is used", stacklevel=2)
        found[name] = f"{copy}:{attribute}"
    return found


def changed(run_dir: Path, names: Iterable[str]) -> list[tuple[Path, Path]]:
    """(file, its copy of then) of those whose content is not what it was when the run was made; one that is gone has
    none.

    names: plug-ins, as above; files that these import are known by their places alone.
    """
    found = []
    for row in _known(run_dir):
        named = next((name for name in names if _is(name.rpartition(":")[0], row["file"], is_file(name))), None)
        file = _origin(row["file"], True) if named is None else _origin(named.rpartition(":")[0], is_file(named))
        if file is not None and _digest(file) != row["sha256"]:
            found.append((file, run_dir / row["copy"]))
    return found


def _known(run_dir: Path) -> list[dict[str, str]]:
    """What environment.json says of the copies; nothing where it cannot be read, or is of an earlier version."""
    try:
        rows = json.loads((run_dir / "environment.json").read_text(encoding="utf-8")).get("plugins") or []
        kept = [{key: str(row[key]) for key in ("copy", "file", "sha256")} for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [row for row in kept if Path(row["copy"]).parts[0] == "plugins" and ".." not in Path(row["copy"]).parts]


def _is(place: str, file: str, plain: bool) -> bool:
    """Whether a plug-in's name is that of a file which was at `file`."""
    if plain:
        return os.path.realpath(place) == file or os.path.abspath(place) == file
    path = Path(*place.split("."))
    return file.endswith((f"{os.sep}{path}.py", f"{os.sep}{path / '__init__.py'}"))


def _origin(place: str, plain: bool) -> Path | None:
    """The file that a plug-in's name means now; None where there is none."""
    if plain:
        return Path(place) if os.path.isfile(place) else None
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and os.path.isfile(spec.origin) else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
