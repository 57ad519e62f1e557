"""The final global model of a run directory, as a module."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.runtime import build
from fedmpi.runtime.trust import guard, run_settings


def load(path: str | Path, trust: bool = False) -> nn.Module:
    """The final global model of a run directory, in evaluation mode.

    Args:
        path: a directory written by `fedmpi run`.
        trust: whether to run the code of others that its config names: a model `file.py:Name`, say.

    Raises:
        UserError: no run directory, its run has not ended yet, damaged files; code of others without `trust`.
    """
    settings = run_settings(Path(path), trust)
    with guard(trust):
        return rebuilt(Path(path), settings)


def rebuilt(run_dir: Path, settings: Settings) -> nn.Module:
    """The same with settings that were read, and are trusted or guarded."""
    weights = run_dir / "model.safetensors"
    if not weights.exists():
        raise UserError(f"{run_dir} holds no model.safetensors: the run has not ended yet, or did not end well")
    try:
        with safe_open(weights, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["fedmpi"])
        shape = tuple(int(size) for size in facts["input_shape"].split(",") if size)
        tensors, classes = load_file(weights), int(facts["classes"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{weights} is damaged, or no model of fedmpi: {type(error).__name__}: {error}") from error
    module = build.make_method(settings).prepare(build.make_module(settings, shape, classes), classes)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # names and shapes that differ
        raise UserError(f"{weights} does not fit the model of config.yaml beside it: {error}") from error
    return module.eval()
