"""Describe how a run is made: config.yaml with every default, and environment.json."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel

from fedmpi import methods, models, tasks
from fedmpi.common import options, registry
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import looks_secret
from fedmpi.common.version import __version__
from fedmpi.config import Settings
from fedmpi.config.loading import shown
from fedmpi.data import augment, partitions, sources

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors", "mpi4py")


# ---- environment.json ----
def describe_environment(
    launcher: str, backend: str, ranks: Sequence[Mapping[str, Any]], threads: int
) -> dict[str, Any]:
    """Return the contents of environment.json: versions, machine, command.

    ranks: facts about each rank, in order, such as {"host": ..., "device": ...}; threads: per rank.
    """
    import torch

    has_gpu, nccl = torch.cuda.is_available(), torch.distributed.is_nccl_available()
    mpi = sys.modules.get("mpi4py.MPI")  # only if it is in use: to import it would start MPI
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(map(shown, sys.argv)),  # without secrets
        "directory": os.getcwd(),
        "launcher": launcher,
        "backend": backend,
        "threads": threads,
        "ranks": [{"rank": rank, **facts} for rank, facts in enumerate(ranks)],
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "git": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"fedmpi": __version__, **{name: installed_version(name) for name in PACKAGES}},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu and nccl else None,
        "mpi": None if mpi is None else mpi.Get_library_version().split("\n", 1)[0].rstrip("\0").strip(),
    }


def git_commit(directory: Path) -> dict[str, Any] | None:
    """Return the commit of the code in `directory`, and whether tracked files differ from it; None without git, or in a
    repository that does not know these files: a project's around its .venv."""
    answers = []
    for arguments in ("rev-parse HEAD HEAD:./", "status --porcelain --untracked-files=no"):
        command = ["git", "-C", str(directory), *arguments.split()]
        try:
            answer = subprocess.run(command, capture_output=True, errors="replace", timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(answer.stdout.split())
    return {"commit": answers[0][0], "modified": bool(answers[1])}


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- config.yaml ----
def resolve(settings: Settings) -> Settings:
    """Return the settings as they are written down: every option of method, model, task, data source, partition,
    augmentation and server rule has its value, of those that are not given the default that its code has today.

    A default may be another one in a later version, and in a file of one's own after the next edit. Left out are
    defaults that YAML cannot hold, or that the option's own type refuses, and what may be a secret. `checkpoint.resume:
    must` and `checkpoint.changes: accept` are said of a start, not of the run, whose config may be run again.
    """
    from fedmpi.aggregation import rules  # imports torch

    data, server, checkpoint = settings.data, settings.server, settings.checkpoint
    operations = []
    for item in data.augment:  # {crop: {size: 32}} with all options, or as it was where it has none
        name, given = (item, None) if isinstance(item, str) else next(iter(item.items()))
        target = registry.load(name, augment.registry, "augmentation")
        given = {} if given is None else given if isinstance(given, Mapping) else {target.short: given}
        full = {**given, **defaults(target, given)}
        operations.append({name: full} if full else item)
    parts: dict[str, Any] = {"augment": tuple(operations)}
    if data.partition is not None:
        parts["partition"] = _resolve_section(data.partition, partitions.KIND)
    once = {"changes": "refuse"} | ({"resume": "never"} if checkpoint.resume == "must" else {})
    new: dict[str, Any] = {
        "method": settings.method.model_copy(
            update=_resolve_method(settings.method.selected_name, settings.method.options)
        ),
        "model": _resolve_section(settings.model, models.KIND),
        "task": _resolve_section(settings.task, tasks.KIND),
        "data": _resolve_section(data, sources.KIND).model_copy(update=parts),
        "checkpoint": checkpoint.model_copy(update=once),
    }
    if server.rule.name != "auto":
        new["server"] = server.model_copy(update={"rule": _resolve_section(server.rule, rules.KIND)})
    return settings.model_copy(update=new)


def _resolve_section(section: Any, kind: registry.PluginKind) -> BaseModel:
    """Return a section that names something of a kind with all options of that."""
    target = registry.load(section.selected_name, kind.registry, kind.label)
    copy: BaseModel = section.model_copy(update=defaults(target, section.options, kind.supplied, section.reserved_keys))
    return copy


def _resolve_method(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a method, and of methods that are options of it."""
    target = registry.load(name, methods.registry, methods.KIND.label)
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    inner = {f.name: f.default for f in fields if f.metadata.get("method")}
    plain = {key: value for key, value in given.items() if key not in inner}
    out = {**given, **defaults(target, plain, ("name", *inner))}
    for key, default in inner.items():
        chosen = given.get(key, default if default is None else dataclasses.MISSING)
        if chosen is None:
            out[key] = None
        elif chosen is not dataclasses.MISSING:
            own = dict(chosen) if isinstance(chosen, Mapping) else {"name": chosen}
            if (method := own.pop("name", None)) is not None:
                out[key] = {"name": method, **_resolve_method(str(method), own)}
    return out


def defaults(
    target: Any, given: Mapping[str, Any], supplied: Sequence[str] = (), beside: Collection[str] = ()
) -> dict[str, Any]:
    """Return option -> default for the options that are not given."""
    typed, out = options.declared_options(target, given, supplied)[0], dict[str, Any]()
    parameters = inspect.signature(target).parameters.values()
    declared = {each.name: each.default for each in parameters if each.default is not each.empty}
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    declared |= {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    for name, default in declared.items():
        if name in given or name in supplied or name in beside or looks_secret(name, default):
            continue
        try:
            value = json.loads(json.dumps(default, default=_path_text))  # as YAML gives it back: tuples as lists
            checked = options.check(target, {**given, name: value}, "", supplied)[name]
            # (3, 3) comes back as a list where no type says otherwise: a user's own code may mind.
            is_typed = typed.get(name, Any) is not Any
            if checked == default or (is_typed and json.loads(json.dumps(checked, default=_path_text)) == value):
                out[name] = value
        except (UserError, ValueError, TypeError):  # what no file can hold; None that stands for "not given"; arrays
            continue
    return out


def _path_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written down")
