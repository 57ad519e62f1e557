"""The global model of a run directory, the final or the best one, as a module."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from fedmpi.runtime.record.predictor import Predictor
from fedmpi.runtime.record.run_dir import BEST, MODEL
from fedmpi.runtime.trust import guard, run_settings


def load(path: str | Path, trust: bool = False, best: bool = False) -> nn.Module:
    """The global model of a run directory, in evaluation mode, with a function `predict(rows)` for new rows.

    Args:
        path: a directory written by `fedmpi run`.
        trust: whether to run the code of others that its config names: a model `file.py:Name`, say.
        best: the best model by evaluate.best, in place of the final one.

    Raises:
        UserError: no run directory, its run has not ended yet, damaged files; code of others without `trust`.
    """
    settings, name = run_settings(Path(path), trust), BEST if best else MODEL
    with guard(trust):
        return predicting(rebuilt(Path(path), settings, name), Path(path), settings, name)


def predicting(
    module: nn.Module, run_dir: Path, settings: Settings, name: str = MODEL, client: int | None = None
) -> nn.Module:
    """The module with a function `predict(rows)` (predictor.py), unless it has one of its own. client: whose model it
    is, where it is not the global one."""
    if not hasattr(module, "predict"):
        facts = facts_of(run_dir / name)
        shape = input_of(facts)[0]
        module.predict = Predictor(run_dir, settings, module, int(facts["classes"]), shape, client)  # type: ignore[assignment]
    return module


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
        shape, dtype = input_of(facts)
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


def input_of(facts: Mapping[str, Any]) -> tuple[Shape, Type]:
    """Shape and type of one sample that the model takes."""
    if "input" in facts:
        return from_text(facts["input"])
    sizes = str(facts["input_shape"])  # what runs wrote until samples could be of other types: `1,8,8`
    return tuple(int(size) for size in sizes.split(",") if size), torch.float32
