"""What the files of models in a run directory say of themselves: what a model takes, and whether clients use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, from_text
from fedmpi.engine.messages import Messages
from fedmpi.engine.reporting import OWN, own_parts
from fedmpi.method.base import overrides
from fedmpi.runtime.record.run_dir import BEST


def personal_facts(name: str, messages: Messages) -> dict[str, str]:
    """What a file of the global model is to say of itself where clients use other models than that; else {}. name: that
    of the method."""
    kept = ", ".join(sorted(own_parts(messages)))
    hooks = ", ".join(hook for hook in (*OWN, "tune") if overrides(messages.method, hook))
    return {"method": name, "kept": kept, "hooks": hooks} if kept or hooks else {}


def personal_notice(facts: Mapping[str, Any]) -> str:
    """Say, of a file with these facts, that clients use other models; "" where they do not."""
    name, kept, hooks = (str(facts.get(key, "")) for key in ("method", "kept", "hooks"))
    if not kept and hooks == "tune":
        return (
            f"method {name} tunes the global model with each client's data before the client uses it "
            "(evaluate.protocol: ft(e)); this is the global model"
        )
    if kept:
        said = f"method {name} keeps parts of the model with each client ({kept}), and the global model has their "
        said += "initial values there"
    elif hooks:
        said = f"method {name} gives each client a model of its own, and this is the global one"
    else:
        return ""
    return f"{said}. A client's own model: fedmpi.load(RUN_DIR, client=k), or fedmpi export RUN_DIR --client k"


def best_model(run_dir: Path) -> dict[str, Any] | None:
    """What the best model of a run says of itself: its figure, round and value; None where there is none."""
    facts = facts_of(run_dir / BEST)
    return {"file": BEST, **{key: facts.get(key) for key in ("figure", "round", "value")}} if facts else None


def facts_of(path: Path) -> dict[str, Any]:
    """What a file of weights says of itself; {} where there is none, or it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})["fedmpi"])
    except (SafetensorError, OSError, ValueError, KeyError):
        return {}
    return found if isinstance(found, dict) else {}


def read_model(path: Path) -> tuple[dict[str, Tensor], tuple[Shape, Type], int]:
    """Return the tensors of a file of weights, shape and type of one sample that the model takes, and the number of
    classes. Raises UserError for a file that is damaged, or that fedmpi has not written."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["fedmpi"])
        return load_file(path), input_of(facts), int(facts["classes"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged, or no model of fedmpi: {type(error).__name__}: {error}") from error


def input_of(facts: Mapping[str, Any]) -> tuple[Shape, Type]:
    """Shape and type of one sample that the model takes."""
    if "input" in facts:
        return from_text(facts["input"])
    sizes = str(facts["input_shape"])  # what runs wrote until samples could be of other types: `1,8,8`
    return tuple(int(size) for size in sizes.split(",") if size), torch.float32
