"""The metadata in files of models: what a model takes as input, and whether clients use models of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, from_text
from fedmpi.engine.evaluate import OWN, own_parts
from fedmpi.engine.messages import Messages
from fedmpi.method.base import overrides
from fedmpi.runtime.record.run_dir import BEST


def personal_facts(name: str, messages: Messages) -> dict[str, str]:
    """Return the metadata for a global model if clients use other models than that; else {}. name: the method's."""
    groups = ", ".join(sorted(own_parts(messages)))
    hooks = ", ".join(hook for hook in (*OWN, "tune") if overrides(messages.method, hook))
    return {"method": name, "kept": groups, "hooks": hooks} if groups or hooks else {}


def personal_notice(facts: Mapping[str, Any]) -> str:
    """Return the notice that clients use other models than the one with these facts; "" if they do not."""
    name, groups, hooks = (str(facts.get(key, "")) for key in ("method", "kept", "hooks"))
    if not groups and not hooks:
        return ""
    if not groups and hooks == "tune":
        return (
            f"method {name} tunes the global model with each client's data before the client uses it "
            "(evaluate.protocol: ft(e)); this is the global model"
        )
    if groups:
        notice = f"keeps parts of the model with each client ({groups}), and the global model has their initial values "
        notice += "there"
    else:
        notice = "gives each client a model of its own, and this is the global one"
    more = "A client's own model: fedmpi.load(RUN_DIR, client=k), or fedmpi export RUN_DIR --client k"
    return f"method {name} {notice}. {more}"


def best_model(run_dir: Path) -> dict[str, Any] | None:
    """Return figure, round and value of a run's best model; None where there is none."""
    facts = facts_of(run_dir / BEST)
    return {"file": BEST, **{key: facts.get(key) for key in ("figure", "round", "value")}} if facts else None


def facts_of(path: Path) -> dict[str, Any]:
    """Return the metadata of a file of weights; {} if the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["fedmpi"])
    except (SafetensorError, OSError, ValueError, KeyError):
        return {}
    return facts if isinstance(facts, dict) else {}


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
    """Return shape and type of one sample that the model takes."""
    return from_text(facts["input"])
