"""The files of the user's own code that a run is made with: compared by all ranks, and copied into the run directory.

They are those that the config names, and those that define its method, task and module. Copies are for people to read,
and for who loads the run when the files themselves are changed or gone. Modules that they import from beside them
(common/plugin_imports.py) are compared, but not copied.

This imports no torch and none of the code.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedmpi.common import plugin_imports
from fedmpi.common.errors import UserError
from fedmpi.common.registry import is_file
from fedmpi.common.user_code_errors import PACKAGE, is_users_file

if TYPE_CHECKING:
    from fedmpi.runtime.record.run_dir import RunDirectory


class PluginFile(NamedTuple):
    """A file of the user's own code. name: that of its copy, which is NAME-2.py for the second file called NAME.py."""

    name: str
    path: Path
    content: bytes


def find_plugins(names: Iterable[str], *objects: Any) -> list[PluginFile]:
    """Return the files that define these plug-ins (`file.py:Name` or `package.module:Name`), and the classes of the
    `objects` as far as they are the user's own."""
    files: list[str | None] = []
    for name in names:
        place = name.rpartition(":")[0]
        files.append(place if is_file(name) else getattr(sys.modules.get(place), "__file__", None))
    paths = [Path(file) for file in files if file and not file.startswith(f"{PACKAGE}/")]
    modules = [sys.modules.get(type(each).__module__) for each in objects]
    files = [getattr(module, "__file__", None) for module in modules]
    paths += [Path(file) for file in files if file and is_users_file(file)]
    plugins, same_name = list[PluginFile](), Counter[str]()
    for path in dict.fromkeys(path.resolve() for path in paths):
        if path.is_file():
            same_name[path.name] += 1
            name = path.name if same_name[path.name] == 1 else f"{path.stem}-{same_name[path.name]}{path.suffix}"
            plugins.append(PluginFile(name, path, path.read_bytes()))
    return plugins


def digests(plugins: Sequence[PluginFile]) -> dict[str, str]:
    """Return digests of plug-ins and of what they import, which ranks and resumed runs compare; paths may differ."""
    known = {each.path for each in plugins}
    contents = {f"(plug-in {each.name})": each.content for each in plugins}
    for each in plugins:
        for module, file in plugin_imports.find_imports(each.path).items():
            if file not in known:
                contents[f"(module {module} of plug-in {each.name})"] = file.read_bytes()
    return {key: hashlib.sha256(content).hexdigest()[:12] for key, content in contents.items()}


def write_copies(directory: RunDirectory, plugins: Sequence[PluginFile]) -> list[dict[str, str]]:
    """Copy plug-ins into plugins/ of a run directory. Returns what environment.json says of each.

    A copy of another content, which the run had before checkpoint.changes=accept, stays there under another name.
    """
    rows = []
    for name, path, content in plugins:
        copy = f"plugins/{name}"
        before = directory.path / copy
        if before.exists() and before.read_bytes() != content:
            before.rename(before.with_name(f"{before.stem}.{digest(before)[:8]}{before.suffix}"))
        directory.write(copy, content)
        rows.append({"copy": copy, "file": str(path), "sha256": hashlib.sha256(content).hexdigest()})
    return rows


def relocate(run_dir: Path, names: Iterable[str], changed: bool = True) -> dict[str, str]:
    """Return for plug-ins `file.py:Name` that are gone or have changed: name -> name with the path of the copy.

    Args:
        run_dir: the run directory.
        names: of plug-ins; what `package.module:Name` imports is taken as it is installed.
        changed: whether copies also stand for files that are there, with another content than then.

    Raises:
        UserError: the copy was changed itself.
    """
    copies, new_names = _copies(run_dir), dict[str, str]()
    for name in filter(is_file, dict.fromkeys(names)):
        place, _, attribute = name.rpartition(":")
        row, is_there = copies.get(os.path.realpath(place)), Path(place).is_file()
        if row is None or (is_there and (not changed or digest(Path(place)) == row["sha256"])):
            continue
        copy = run_dir.absolute() / row["copy"]
        if not copy.is_file() or digest(copy) != row["sha256"]:
            what = "has changed" if copy.is_file() else "is missing"
            raise UserError(
                f"{copy} {what}: it is the copy of {row['file']} that this run was made with (SHA-256 "
                f"{row['sha256'][:12]}...), and that file is not there either; put one of them back"
            )
        if is_there:
            warnings.warn(f"{place} has changed since this run was made; its copy {copy} is used", stacklevel=3)
        new_names[name] = f"{copy}:{attribute}"
    return new_names


def _copies(run_dir: Path) -> dict[str, dict[str, str]]:
    """Return {file: entry on its copy} of environment.json, which may be somebody else's; {} where it is damaged."""
    try:
        rows = json.loads((run_dir / "environment.json").read_text(encoding="utf-8")).get("plugins") or []
        copies = [{key: str(row[key]) for key in ("copy", "file", "sha256")} for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    inside = [row for row in copies if Path(row["copy"]).parts[0] == "plugins" and ".." not in Path(row["copy"]).parts]
    return {row["file"]: row for row in inside}


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
