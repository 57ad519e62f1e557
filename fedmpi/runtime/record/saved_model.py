"""Read model files: their tensors, their metadata, and initial weights for a run (init.from)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, decode_format
from fedmpi.engine.evaluate import PERSONAL_MODEL_HOOKS, personal_groups
from fedmpi.engine.messages import MessageLayouts
from fedmpi.method.base import overrides
from fedmpi.models.pretrained import copy_matching_tensors
from fedmpi.runtime.record.run_dir import BEST, MODEL


# ---- metadata ----
def describe_personal_models(name: str, messages: MessageLayouts) -> dict[str, str]:
    """Return metadata about the clients' own models, for the file of the global model; {} if there are none.

    name: the name of the method.
    """
    groups = ", ".join(sorted(personal_groups(messages)))
    hooks = ", ".join(hook for hook in (*PERSONAL_MODEL_HOOKS, "finetune") if overrides(messages.method, hook))
    return {"method": name, "kept": groups, "hooks": hooks} if groups or hooks else {}


def format_personal_notice(facts: Mapping[str, Any]) -> str:
    """Return a notice that clients use models other than the global model; "" if they do not.

    facts: the metadata of the global model's file, which include the result of `describe_personal_models`.
    """
    name, groups, hooks = (str(facts.get(key, "")) for key in ("method", "kept", "hooks"))
    if not groups and not hooks:
        return ""
    own = "For a client's own model, use fedmpi.load(RUN_DIR, client=k), or fedmpi export RUN_DIR --client k"
    if groups:
        return (
            f"method {name} keeps parts of the model with each client ({groups}); in the global model they have their "
            f"initial values. {own}"
        )
    if hooks != "finetune":
        return f"with method {name} each client has its own model, but this is the global model. {own}"
    return (
        f"method {name} fine-tunes the global model on each client's data before the client uses it "
        "(evaluate.protocol: ft(e)); this is the global model without fine-tuning"
    )


def describe_best_model(run_dir: Path) -> dict[str, Any] | None:
    """Return a dict with the file, metric, round and value of the best model of a run; None if there is none."""
    facts = read_model_metadata(run_dir / BEST)
    return {"file": BEST, **{key: facts.get(key) for key in ("metric", "round", "value")}} if facts else None


def read_model_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a model file; return {} if the file is missing or damaged."""
    try:
        facts = _read_metadata(path)
    except (SafetensorError, OSError, ValueError, KeyError):
        return {}
    return facts if isinstance(facts, dict) else {}


def read_model(path: Path) -> tuple[dict[str, Tensor], tuple[Shape, Type], int]:
    """Read a model file that fedmpi has written.

    Returns:
        The tensors by state_dict name; the shape and dtype of one input sample; the number of classes.

    Raises:
        UserError: The file is missing or damaged, or was not written by fedmpi.
    """
    try:
        facts = _read_metadata(path)
        return load_file(path), parse_input_shape(facts), int(facts["classes"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        message = f"{path} is damaged, or is not a model file of fedmpi"
        raise UserError(f"{message}: {type(error).__name__}: {error}") from error


def parse_input_shape(facts: Mapping[str, Any]) -> tuple[Shape, Type]:
    """Return the shape and dtype of one input sample of a model, given the metadata of the model's file."""
    return decode_format(facts["input"])


def _read_metadata(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {})["fedmpi"])


# ---- initial weights (init.from) ----
@dataclass(frozen=True)
class InitialWeights:
    """Initial weights that were loaded from a file (init.from)."""

    content: bytes  # the content of the file
    lines: list[str]  # for the console: which tensors of the file fit the model


def load_initial_weights(module: nn.Module, source: Path, strict: bool) -> InitialWeights:
    """Copy tensors from a file into those tensors of a module that have the same name and shape.

    Args:
        source: A safetensors file, or a run directory, whose final model is used.
        strict: Whether to raise an error unless all tensors of module and file match (init.strict).

    Raises:
        UserError: The file is missing or is not a safetensors file; no tensor matches; with `strict`, a tensor
            does not match; or a tensor has values that are not finite.
    """
    path = source / MODEL if source.is_dir() else source
    try:
        content = path.read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"init.from: {path} cannot be read ({error}); must be a run directory with a {MODEL}, or a .safetensors "
            "file, written by safetensors.torch.save_file(model.state_dict(), PATH)"
        ) from error
    match = copy_matching_tensors(module, tensors, f"init.from: {path}")
    differences = match.describe_differences()
    if not match.fitting or (strict and differences):
        problem = (
            f"init.strict: {path} and the model differ" if match.fitting else f"init.from: no tensor in {path} matches"
        )
        remedy = (
            "set init.strict: false to load only matching tensors" if match.fitting else "use another file or model"
        )
        raise UserError(f"{problem}; {'; '.join(differences)}; {remedy}")
    notice = format_personal_notice(read_model_metadata(path))
    notices = [f"{path}: {notice}"] if notice else []
    return InitialWeights(
        content,
        [f"{len(match.fitting)} of {match.total} tensors of the model are loaded from {path}", *differences, *notices],
    )
