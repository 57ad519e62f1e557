"""Refuse code of others that the config of a run directory names.

A config is code: wherever it names `file.py:Name` or `package.module:Name`, that file is executed. A run directory has
a config of its own, and may be somebody else's. Unless it is trusted, one that names code which is not fedmpi's own is
refused, as is one whose config leads to further files (`base`; fedmpi writes none), and nothing is downloaded for it.

This imports no torch: the number of threads stands in the settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from fedmpi import config
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.config import loading
from fedmpi.config.yaml_source import Document, read
from fedmpi.runtime import introspection
from fedmpi.runtime.reading.files import no_run
from fedmpi.runtime.record import plugins

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


def run_settings(run_dir: Path, trust: bool, overrides: Sequence[str] = ()) -> config.Settings:
    """Load the settings of a run directory, with overrides of the caller's own, which are trusted.

    Where plug-ins are no longer where they were, the settings name their copies in the run directory. Raises UserError:
    no run directory; or it is not trusted, and names code or files of its own.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise no_run(run_dir)
    given = ["init.from=null", *NO_LOGGERS, *overrides]  # the run has a model of its own
    if trust:
        return config.load(path, given, plugins.relocate(run_dir, plugins_of(path, given)))
    tree, how = (
        read(path).data,
        "if it is yours, or you trust who made it: trust=True in Python, --trust on the command line",
    )
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
    """Load the settings with which the user's own run is resumed.

    Plug-ins that have moved are named by their new place, else by their copy in the run directory.
    """
    path = run_dir / "config.yaml"
    return config.load(path, overrides, plugins.relocate(run_dir, plugins_of(path, overrides), changed=False))


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


def plugins_of(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the names of the plug-ins in a config with these overrides."""
    layers = Document(read(path).data), loading.command_line(overrides)
    return list(foreign(loading.merge(*layers).data).values())


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
