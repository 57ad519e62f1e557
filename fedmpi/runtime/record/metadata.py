"""Compute the content of config.yaml (the settings with all defaults) and environment.json (versions and machine)."""

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
from fedmpi.config.loading import redact_override
from fedmpi.data import partitions, sources, transforms

PACKAGES = (
    *("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors", "mpi4py"),
    *("timm", "transformers", "monai"),
)


# ---- environment.json ----
def describe_environment(
    launcher: str, backend: str, ranks: Sequence[Mapping[str, Any]], threads: int
) -> dict[str, Any]:
    """Return the content of environment.json: the command, versions of packages, and the machine.

    Args:
        launcher: The launcher of the job, such as "mpi".
        backend: The communication backend, such as "gloo".
        ranks: For each rank, in order, a dict such as {"host": ..., "device": ...}.
        threads: The number of threads per rank.
    """
    import torch

    has_gpu, nccl = torch.cuda.is_available(), torch.distributed.is_nccl_available()
    mpi = sys.modules.get("mpi4py.MPI")  # not imported here, as an import starts MPI
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(map(redact_override, sys.argv)),  # secrets are hidden
        "directory": os.getcwd(),
        "launcher": launcher,
        "backend": backend,
        "threads": threads,
        "ranks": [{"rank": rank, **facts} for rank, facts in enumerate(ranks)],
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "git": find_git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"fedmpi": __version__, **{name: find_installed_version(name) for name in PACKAGES}},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu and nccl else None,
        "mpi": None if mpi is None else mpi.Get_library_version().split("\n", 1)[0].rstrip("\0").strip(),
    }


def find_git_commit(directory: Path) -> dict[str, Any] | None:
    """Return {"commit": hash, "modified": whether tracked files differ from the commit} for the code in `directory`.

    The result is None if git is missing or no repository tracks this code, for example if it is installed in a .venv.
    """
    answers = []
    for arguments in ("rev-parse HEAD HEAD:./", "status --porcelain --untracked-files=no"):
        command = ["git", "-C", str(directory), *arguments.split()]
        try:
            answer = subprocess.run(command, capture_output=True, errors="replace", timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(answer.stdout.split())
    return {"commit": answers[0][0], "modified": bool(answers[1])}


def find_installed_version(package: str) -> str | None:
    """Return the version of a Python package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- config.yaml ----
def resolve_settings(settings: Settings) -> Settings:
    """Return the settings as they are written to config.yaml, with the values of all options.

    Options of method, model, task, data source, partition, augmentation and aggregation rule that the config leaves out
    are set to their current defaults, because a later version may change them. No default is added if the
    option may be a secret, its type does not allow the default, or YAML cannot represent the default.
    `checkpoint.resume: must` and `checkpoint.changes: accept` are reset, because they apply to one start of the run.
    """
    from fedmpi.aggregation import rules  # imports torch

    data, server, checkpoint = settings.data, settings.server, settings.checkpoint
    operations = []
    for item in data.augment:  # becomes {random_crop: {size: 32}} with all options, or is kept if it has none
        name, given = (item, None) if isinstance(item, str) else next(iter(item.items()))
        target = registry.load_object(name, transforms.registry, "augmentation")
        given = {} if given is None else given if isinstance(given, Mapping) else {target.main_option: given}
        full = {**given, **missing_defaults(target, given)}
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
    """Return a copy of a section that selects a component, such as a model, with all options of the component."""
    target = registry.load_object(section.selected_name, kind.registry, kind.label, "", kind.libraries)
    supplied = (*kind.engine_arguments, *kind.optional_arguments)
    copy: BaseModel = section.model_copy(
        update=missing_defaults(target, section.options, supplied, section.reserved_keys)
    )
    return copy


def _resolve_method(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a method. If an option is itself a method, its options are included."""
    target = registry.load_object(name, methods.registry, methods.KIND.label)
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    inner = {f.name: f.default for f in fields if f.metadata.get("method")}
    plain = {key: value for key, value in given.items() if key not in inner}
    out = {**given, **missing_defaults(target, plain, ("name", *inner))}
    for key, default in inner.items():
        chosen = given.get(key, default if default is None else dataclasses.MISSING)
        if chosen is None:
            out[key] = None
        elif chosen is not dataclasses.MISSING:
            own = dict(chosen) if isinstance(chosen, Mapping) else {"name": chosen}
            if (method := own.pop("name", None)) is not None:
                out[key] = {"name": method, **_resolve_method(str(method), own)}
    return out


def missing_defaults(
    target: Any, given: Mapping[str, Any], supplied: Sequence[str] = (), reserved_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Return, by name, the defaults of those options of a component that the config does not set.

    Args:
        target: The class or function of the component.
        given: The options that the config sets.
        supplied: Parameters that fedmpi passes itself; they are not options.
        reserved_keys: Keys that belong to the config section, not to the component.
    """
    typed, out = options.read_declared_options(target, given, supplied)[0], dict[str, Any]()
    parameters = inspect.signature(target).parameters.values()
    declared = {each.name: each.default for each in parameters if each.default is not each.empty}
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    declared |= {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    for name, default in declared.items():
        if name in given or name in supplied or name in reserved_keys or looks_secret(name, default):
            continue
        try:
            value = json.loads(
                json.dumps(default, default=_path_to_text)
            )  # as YAML would return it: tuples become lists
            checked = options.check_options(target, {**given, name: value}, "", supplied)[name]
            # Without a type annotation, (3, 3) would be read back as a list, which a plug-in may not accept.
            is_typed = typed.get(name, Any) is not Any
            if checked == default or (is_typed and json.loads(json.dumps(checked, default=_path_to_text)) == value):
                out[name] = value
        except (UserError, ValueError, TypeError):  # values that a file cannot contain, such as arrays
            continue
    return out


def _path_to_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written to JSON")
