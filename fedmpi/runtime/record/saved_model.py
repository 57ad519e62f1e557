"""The global model of a run directory, the final or the best one, as a module."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.runtime import build
from fedmpi.runtime.record.model_facts import input_of
from fedmpi.runtime.record.run_dir import BEST, MODEL


def rebuilt(run_dir: Path, settings: Settings, name: str = MODEL) -> nn.Module:
    """Return the global model of a run directory, in evaluation mode.

    Args:
        settings: those of the run, by `trust.run_settings`; call this within `trust.guard`.
        name: the file of the final model, or of the best one.

    Raises:
        UserError: the run has not ended yet, or the file is damaged or of another model.
    """
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
    module = build.prepared_module(settings, build.make_method(settings), shape, classes, dtype)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # names and shapes that differ
        raise UserError(f"{weights} does not fit the model of config.yaml beside it: {error}") from error
    return module.eval()
