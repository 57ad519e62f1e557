"""fedmpi from Python: a notebook, a script, or a rank of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fedmpi import build, config, launch
from fedmpi.errors import UserError


class Summary(dict[str, Any]):
    """summary.json of a run, and `directory`; empty on ranks other than 0."""


def run(settings: str | Path | config.Settings, overrides: Sequence[str] = ()) -> Summary:
    """Run one experiment; the ranks are found as on the command line (none: one process).

    Args:
        settings: a YAML file, or settings made by `fedmpi.config.load`.
        overrides: as on the command line, `["train.epochs=3"]`.

    Raises:
        UserError: a mistake in config or data.
    """
    if not isinstance(settings, config.Settings):
        settings = config.load(settings, overrides)
    return Summary(launch.execute(settings)[0])


def load(run_dir: str | Path) -> nn.Module:
    """The final global model of a run directory, in evaluation mode."""
    run_dir = Path(run_dir)
    weights = run_dir / "model.safetensors"
    if not weights.exists():
        raise UserError(f"{run_dir} holds no model.safetensors: not a run directory, or the run has not ended yet")
    with safe_open(weights, framework="pt") as file:
        facts = json.loads(file.metadata()["fedmpi"])
    shape = tuple(int(size) for size in facts["input_shape"].split(",") if size)
    settings, classes = config.load(run_dir / "config.yaml"), int(facts["classes"])
    module = build.make_method(settings).prepare(build.make_module(settings, shape, classes), classes)
    module.load_state_dict(load_file(weights))
    return module.eval()
