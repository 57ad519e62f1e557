"""The global model of a run directory, the final or the best one, as a module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, from_text
from fedmpi.config.schema import Settings
from fedmpi.runtime import build
from fedmpi.runtime.record.run_dir import BEST, MODEL
from fedmpi.runtime.trust import guard, run_settings


def load(path: str | Path, trust: bool = False, best: bool = False) -> nn.Module:
    """The global model of a run directory, in evaluation mode.

    Args:
        path: a directory written by `fedmpi run`.
        trust: whether to run the code of others that its config names: a model `file.py:Name`, say.
        best: the best model by evaluate.best, in place of the final one.

    Raises:
        UserError: no run directory, its run has not ended yet, damaged files; code of others without `trust`.
    """
    settings = run_settings(Path(path), trust)
    with guard(trust):
        return rebuilt(Path(path), settings, BEST if best else MODEL)


def rebuilt(run_dir: Path, settings: Settings, name: str = MODEL) -> nn.Module:
    """The same with settings that were read, and are trusted or guarded."""
    weights = run_dir / name
    if name == BEST and not weights.exists():
        raise UserError(
            f"{run_dir} holds no {BEST}: set evaluate.best and data.validation, and a run chooses its best model"
        )
    if not weights.exists():
        raise UserError(f"{run_dir} holds no model.safetensors: the run has not ended yet, or did not end well")
    try:
        with safe_open(weights, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["fedmpi"])
        shape, dtype = from_text(facts["input"]) if "input" in facts else _of_old(facts["input_shape"])
        tensors, classes = load_file(weights), int(facts["classes"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{weights} is damaged, or no model of fedmpi: {type(error).__name__}: {error}") from error
    module = build.make_method(settings).prepare(build.make_module(settings, shape, classes, dtype), classes)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # names and shapes that differ
        raise UserError(f"{weights} does not fit the model of config.yaml beside it: {error}") from error
    return module.eval()


def facts_of(path: Path) -> dict[str, Any]:
    """What a file of weights says of itself; {} where there is none, or it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})["fedmpi"])
    except (SafetensorError, OSError, ValueError, KeyError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_old(sizes: str) -> tuple[Shape, Type]:
    """What runs wrote until samples could be of other types: `1,8,8`."""
    return tuple(int(size) for size in sizes.split(",") if size), torch.float32
