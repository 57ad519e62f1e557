"""Handle plug-in code named in a config: refuse it in untrusted run directories, compare it between ranks, copy it.

A config can execute code: a name `file.py:Name` or `package.module:Name` imports that file or module. A run directory
contains a config and may come from another person. Unless the caller trusts the run directory, it is refused if its
config names code outside fedmpi. It is also refused if the config has base configs, which fedmpi never writes to a run
directory. An untrusted run directory that is not refused is used with data.download: false.

All ranks compare the plug-in files of a run. Rank 0 copies them into the run directory, where users can read them. If
an original file is changed or deleted later, its copy is loaded. Modules that a plug-in imports from its own folder
(common/plugin_imports.py) are compared, but not copied.

This module imports neither torch nor any of the plug-ins.
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
from fedmpi.config.field_types import flatten
from fedmpi.config.yaml_source import ConfigLayer, read_yaml_file
from fedmpi.runtime import introspection
from fedmpi.runtime.inspection.run_files import check_written_by_this_version, not_a_run_error, read_json_object

if TYPE_CHECKING:
    from fedmpi.runtime.record.run_dir import RunDirectory

NO_LOGGERS = ("loggers=[]", "callbacks=[]")  # reading a finished run must not notify loggers and callbacks
CODE_KEYS = {  # config keys that can name code -> the kind of component
    ("data", "source"): "datasets",
    ("data", "partition", "scheme"): "partitions",
    ("model", "name"): "models",
    ("task", "name"): "tasks",
    ("method", "name"): "methods",  # and all other texts of the section, as a method can be an option of another one
    ("server", "rule"): "rules",
    ("server", "rule", "name"): "rules",
}


# ---- the settings of a run directory ----
def load_run_settings(run_dir: Path, trust: bool, overrides: Sequence[str] = ()) -> config.Settings:
    """Load the settings of a run directory, to read or use a finished run.

    If plug-in files were deleted or changed since the run, the settings name their copies in the run directory.

    Args:
        trust: Whether code outside fedmpi that the config names may be executed.
        overrides: Settings KEY=VALUE of the caller, which are trusted.

    Raises:
        UserError: There is no run directory; or `trust` is false, and the config names external code or base configs.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise not_a_run_error(run_dir)
    given = ["init.from=null", *NO_LOGGERS, *overrides]  # the trained model is loaded later from the run directory
    if trust:
        return _load_with_plugin_copies(run_dir, given)
    tree = read_yaml_file(path).data
    check_written_by_this_version(run_dir, flatten(tree, ""))
    remedy = "if you trust its author, use --trust on the command line, or trust=True in Python"
    if "base" in tree:
        raise UserError(
            f"{path} names other files (base), which fedmpi never writes there: the file was changed. "
            f"They were not read; {remedy}"
        )
    if names := find_external_code(tree):
        named = ", ".join(f"{name} ({where})" for where, name in names.items())
        raise UserError(f"{run_dir} names code that is not part of fedmpi: {named}. It was not executed; {remedy}")
    return config.load(path, ["data.download=false", *given])


def load_resume_settings(run_dir: Path, overrides: Sequence[str]) -> config.Settings:
    """Load the settings to resume a run. If the file of a plug-in was deleted, the run's copy of the file is used."""
    return _load_with_plugin_copies(run_dir, overrides, changed=False)


def load_replay_settings(
    run_dir: Path, trust: bool, overrides: Sequence[str] = (), place: Sequence[str] | None = None
) -> config.Settings:
    """Load the settings for a replay of a run, with the same rank failures, initial weights and noise as in the run.

    Args:
        trust: Whether code outside fedmpi that the config names may be executed.
        overrides: Settings KEY=VALUE of the caller, which are trusted.
        place: Settings KEY=VALUE that give the replay its `output` and `name`; default: NAME-replay next to the run.
    """
    given = ["faults.on_lost_rank=abort", "checkpoint.resume=never"]
    files = {"faults.replay": "faults.jsonl", "init.from": "initial.safetensors"}
    for key, file in files.items():
        path = run_dir / file
        given.append(f"{key}={json.dumps(str(path)) if path.exists() else 'null'}")
    if (run_dir / "privacy.json").exists():
        given.append(f"privacy.repeat={json.dumps(str(run_dir))}")
    if place is None:
        place = [f"output={json.dumps(str(run_dir.parent))}", f"name={json.dumps(f'{run_dir.name}-replay')}"]
    return load_run_settings(run_dir, trust, [*overrides, *given, *place])


def forbid_external_code(trust: bool) -> AbstractContextManager[None]:
    """Return a context manager within which loading code outside fedmpi raises an error, unless `trust` is true.

    This is a second line of defence, in case `find_external_code` overlooks code that the config names.
    """
    return nullcontext() if trust else registry.registered_code_only()


def find_external_code(tree: Any) -> dict[str, str]:
    """Return the names of external code (code outside fedmpi) to which a config refers, by config key.

    tree: the config as parsed YAML.
    """
    kinds = (
        (keys, text, CODE_KEYS.get(keys, "methods" if keys[:1] == ("method",) else ""))
        for keys, text in _iter_texts(tree)
    )
    own = {kind: (introspection.read_registry(kind), introspection.read_libraries(kind)) for kind in CODE_KEYS.values()}
    return {".".join(keys): text for keys, text, kind in kinds if kind and registry.is_external_code(text, *own[kind])}


def _iter_texts(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, string) for every string in a tree of dicts and lists; `keys` is the path to it."""
    if isinstance(tree, str):
        yield keys, tree
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _iter_texts(value, (*keys, str(key)))


# ---- plug-in files ----
class PluginFile(NamedTuple):
    """A file of plug-in code. `name` is the name of its copy: the file's name, or NAME-2.py for a second NAME.py."""

    name: str
    path: Path
    content: bytes


def find_plugins(names: Iterable[str]) -> list[PluginFile]:
    """Return the files in which plug-ins are defined, without duplicates.

    names: names of plug-ins, `file.py:Name` or `package.module:Name`.
    """
    places = [(name, name.rpartition(":")[0]) for name in names]
    files = [
        at if registry.is_file_reference(name) else getattr(sys.modules.get(at), "__file__", None)
        for name, at in places
    ]
    plugins, same_name = list[PluginFile](), Counter[str]()
    paths = [Path(file).resolve() for file in files if file and not file.startswith(f"{PACKAGE}/")]
    for path in filter(Path.is_file, dict.fromkeys(paths)):
        same_name[path.name] += 1
        name = path.name if same_name[path.name] == 1 else f"{path.stem}-{same_name[path.name]}{path.suffix}"
        plugins.append(PluginFile(name, path, path.read_bytes()))
    return plugins


def compute_plugin_digests(plugins: Sequence[PluginFile]) -> dict[str, str]:
    """Return digests (short checksums) of plug-in files and of modules that they import, by name.

    The digests are compared between ranks and when a run is resumed; the paths of the files may differ.
    """
    known = {each.path for each in plugins}
    contents = {f"(plug-in {each.name})": each.content for each in plugins}
    for each in plugins:
        for module, file in plugin_imports.find_imports(each.path).items():
            if file not in known:
                contents[f"(module {module} of plug-in {each.name})"] = file.read_bytes()
    return {key: hashlib.sha256(content).hexdigest()[:12] for key, content in contents.items()}


def copy_plugins(directory: RunDirectory, plugins: Sequence[PluginFile]) -> list[dict[str, str]]:
    """Copy plug-in files into the folder plugins/ of a run directory, and return their entries for environment.json.

    If changed plug-ins were accepted (checkpoint.changes=accept), the copies of their earlier versions are renamed.
    """
    rows = []
    for name, path, content in plugins:
        copy = f"plugins/{name}"
        before = directory.path / copy
        if before.exists() and before.read_bytes() != content:
            before.rename(before.with_name(f"{before.stem}.{compute_file_sha256(before)[:8]}{before.suffix}"))
        directory.write(copy, content)
        rows.append({"copy": copy, "file": str(path), "sha256": hashlib.sha256(content).hexdigest()})
    return rows


def _load_with_plugin_copies(run_dir: Path, overrides: Sequence[str], changed: bool = True) -> config.Settings:
    """Load the settings of a run directory; for plug-in files that were deleted, use the run's copies instead.

    Args:
        changed: Whether copies are also used instead of files that have changed since the run began.

    Raises:
        UserError: A copy that is needed is missing or was changed.
    """
    path, copies, new_names = run_dir / "config.yaml", _read_plugin_copies(run_dir), dict[str, str]()
    written = read_yaml_file(path).data
    check_written_by_this_version(run_dir, flatten(written, ""))
    tree = loading.merge_layers(ConfigLayer(written), loading.parse_overrides(overrides)).data
    for name in filter(registry.is_file_reference, find_external_code(tree).values()):
        place, _, attribute = name.rpartition(":")
        row, is_there = copies.get(os.path.realpath(place)), Path(place).is_file()
        if row is None or (is_there and (not changed or compute_file_sha256(Path(place)) == row["sha256"])):
            continue
        copy = run_dir.absolute() / row["copy"]
        if not copy.is_file() or compute_file_sha256(copy) != row["sha256"]:
            what = "has changed" if copy.is_file() else "is missing"
            raise UserError(
                f"{copy}, the copy of {row['file']} that this run used (SHA-256 {row['sha256'][:12]}...), {what}, and "
                f"the original file is missing or has changed; restore one of the two files"
            )
        if is_there:
            warnings.warn(f"{place} has changed since this run; its copy {copy} is used", stacklevel=4)
        new_names[name] = f"{copy}:{attribute}"
    return config.load(path, overrides, new_names)


def _read_plugin_copies(run_dir: Path) -> dict[str, dict[str, str]]:
    """Return the entries of plug-in files in environment.json, by path; {} if environment.json is damaged.

    Entries with a copy outside plugins/ are left out, because the run directory may come from another person.
    """
    try:
        rows = (read_json_object(run_dir / "environment.json") or {}).get("plugins") or []
        copies = [{key: str(row[key]) for key in ("copy", "file", "sha256")} for row in rows]
    except (KeyError, TypeError):
        return {}
    inside = [row for row in copies if Path(row["copy"]).parts[0] == "plugins" and ".." not in Path(row["copy"]).parts]
    return {row["file"]: row for row in inside}


def compute_file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
