"""Code that a config names: whether it may run, which files it is, and their copies in the run directory.

A config is code: wherever it names `file.py:Name` or `package.module:Name`, that file is executed. A run directory has
a config of its own, and may be somebody else's. Unless it is trusted, one that names code which is not fedmpi's own is
refused, as is one whose config leads to further files (`base`; fedmpi writes none), and nothing is downloaded for it.

The files of a run's own code are compared by all ranks and copied into its directory, for people to read, and for who
loads the run when the files themselves are changed or gone. Modules that they import from beside them
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedmpi import config
from fedmpi.common import plugin_imports, registry
from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import PACKAGE
from fedmpi.config import loading
from fedmpi.config.yaml_source import Document, read
from fedmpi.runtime import introspection
from fedmpi.runtime.reading.files import json_of, no_run

if TYPE_CHECKING:
    from fedmpi.runtime.record.run_dir import RunDirectory

NO_LOGGERS = ("track=[]", "callbacks=[]")  # who looks at a run tells nobody of it
NAMED = {  # where a config names code, and what
    ("data", "source"): "datasets",
    ("data", "partition", "scheme"): "partitions",
    ("model", "name"): "models",
    ("task", "name"): "tasks",
    ("method", "name"): "methods",  # any text in the section may name one, as methods are options of others
    ("server", "rule"): "rules",
    ("server", "rule", "name"): "rules",
}


# ---- the settings of a run directory ----
def run_settings(run_dir: Path, trust: bool, overrides: Sequence[str] = ()) -> config.Settings:
    """Load the settings of a run directory, with overrides of the caller's own, which are trusted.

    Where plug-ins are gone or have changed, the settings name their copies in the run directory. Raises UserError: no
    run directory; or it is not trusted, and names code or files of its own.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise no_run(run_dir)
    given = ["init.from=null", *NO_LOGGERS, *overrides]  # the run has a model of its own
    if trust:
        return _with_copies(run_dir, given)
    tree = read(path).data
    how = "if it is yours, or you trust who made it: trust=True in Python, --trust on the command line"
    if "base" in tree:
        raise UserError(
            f"{path} names other files (base), which the config of a run never does: it was changed. "
            f"They are not read; {how}"
        )
    if names := foreign(tree):
        named = ", ".join(f"{name} ({where})" for where, name in names.items())
        raise UserError(f"{run_dir} would run code that is not fedmpi's own: {named}. It was not run; {how}")
    return config.load(path, ["data.download=false", *given])


def resumed_settings(run_dir: Path, overrides: Sequence[str]) -> config.Settings:
    """Load the settings with which the user's own run is resumed; plug-ins that are gone are named by their copies."""
    return _with_copies(run_dir, overrides, changed=False)


def replay_settings(
    run_dir: Path, trust: bool, overrides: Sequence[str] = (), place: Sequence[str] | None = None
) -> config.Settings:
    """Load the settings of a run for a replay: with its faults.jsonl and initial weights.

    place: settings that say where the replay is written; default: beside the run, as NAME-replay.
    """
    given = ["faults.on_lost_rank=abort", "checkpoint.resume=never"]
    files = {"faults.replay": "faults.jsonl", "init.from": "initial.safetensors"}
    for key, file in files.items():
        path = run_dir / file
        given.append(f"{key}={json.dumps(str(path)) if path.exists() else 'null'}")
    if place is None:
        place = [f"output={json.dumps(str(run_dir.parent))}", f"name={json.dumps(f'{run_dir.name}-replay')}"]
    return run_settings(run_dir, trust, [*overrides, *given, *place])


def guard(trust: bool) -> AbstractContextManager[None]:
    """Return a context that refuses to load code from outside fedmpi, unless `trust` is true.

    It is a second lock, for code that `foreign` does not find.
    """
    return nullcontext() if trust else registry.own_code_only()


def foreign(tree: Any) -> dict[str, str]:
    """Return where a config names code that is not fedmpi's own -> that name; `tree` is the config as it was read."""
    kinds = ((keys, text, NAMED.get(keys, "methods" if keys[:1] == ("method",) else "")) for keys, text in _texts(tree))
    own = {kind: introspection.registry(kind) for kind in NAMED.values()}
    return {".".join(keys): text for keys, text, kind in kinds if kind and registry.is_foreign(text, own[kind])}


def _texts(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text inside a tree, with its keys."""
    if isinstance(tree, str):
        yield keys, tree
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _texts(value, (*keys, str(key)))


# ---- the files of a run's own code ----
class PluginFile(NamedTuple):
    """A file of the user's own code. name: that of its copy, which is NAME-2.py for the second file called NAME.py."""

    name: str
    path: Path
    content: bytes


def find_plugins(names: Iterable[str]) -> list[PluginFile]:
    """Return the files that define these plug-ins (`file.py:Name` or `package.module:Name`)."""
    places = [(name, name.rpartition(":")[0]) for name in names]
    files = [at if registry.is_file(name) else getattr(sys.modules.get(at), "__file__", None) for name, at in places]
    plugins, same_name = list[PluginFile](), Counter[str]()
    paths = [Path(file).resolve() for file in files if file and not file.startswith(f"{PACKAGE}/")]
    for path in filter(Path.is_file, dict.fromkeys(paths)):
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


def _with_copies(run_dir: Path, overrides: Sequence[str], changed: bool = True) -> config.Settings:
    """Load the settings of a run directory; plug-ins `file.py:Name` that are gone are named by their copies.

    changed: whether copies also stand for files that are there, with another content than then. Raises UserError where
    the copy itself was changed.
    """
    path, copies, new_names = run_dir / "config.yaml", _copies(run_dir), dict[str, str]()
    tree = loading.merge(Document(read(path).data), loading.command_line(overrides)).data
    for name in filter(registry.is_file, foreign(tree).values()):
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
            warnings.warn(f"{place} has changed since this run was made; its copy {copy} is used", stacklevel=4)
        new_names[name] = f"{copy}:{attribute}"
    return config.load(path, overrides, new_names)


def _copies(run_dir: Path) -> dict[str, dict[str, str]]:
    """Return {file: entry on its copy} of environment.json, which may be somebody else's; {} where it is damaged."""
    try:
        rows = (json_of(run_dir / "environment.json") or {}).get("plugins") or []
        copies = [{key: str(row[key]) for key in ("copy", "file", "sha256")} for row in rows]
    except (KeyError, TypeError):
        return {}
    inside = [row for row in copies if Path(row["copy"]).parts[0] == "plugins" and ".." not in Path(row["copy"]).parts]
    return {row["file"]: row for row in inside}


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
