"""Weights to start from: those of another run, or of a file of safetensors, by the names of `state_dict`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten
from fedmpi.runtime import rank_agreement
from fedmpi.runtime.record.saved_model import facts_of, personal_notice

MODEL, COPY = "model.safetensors", "initial.safetensors"  # in a run directory
LETTERS = 200  # of names in a line


@dataclass(frozen=True)
class Initial:
    """Initial weights: the content of their file, and lines on what of it fits the model."""

    content: bytes
    lines: list[str]

    @property
    def digest(self) -> str:
        return rank_agreement.digest(self.content)


def load_initial_weights(module: nn.Module, source: Path, strict: bool) -> Initial:
    """Copy the tensors of `source`, a file or a run directory, that have name and shape of one of the module's.

    Raises:
        UserError: no such file, or none of safetensors; nothing matches; with `strict`, anything does not.
    """
    path = source / MODEL if source.is_dir() else source
    try:
        content = path.read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"init.from: {path} cannot be read ({error}); a run directory that has a {MODEL}, or a .safetensors file "
            "is needed: safetensors.torch.save_file(model.state_dict(), PATH)"
        ) from error
    own = module.state_dict()
    fitting = [name for name in own if name in tensors and _fits(own[name], tensors[name])]
    parts = {
        "of another shape or type": [
            f"{name} {tuple(own[name].shape)}, in the file {tensors[name].dtype} {tuple(tensors[name].shape)}"
            for name in own
            if name in tensors and name not in fitting
        ],
        "only in the file": [name for name in tensors if name not in own],
        "as the seed made them": [name for name in own if name not in fitting],
    }
    differences = [f"{what}: {shorten(', '.join(names), LETTERS)}" for what, names in parts.items() if names]
    if not fitting or (strict and differences):
        problem = f"init.strict: {path} and the model differ" if fitting else f"init.from: nothing in {path} fits"
        raise UserError(f"{problem}; {'; '.join(differences)}")
    with torch.no_grad():
        for name in fitting:
            if not bool(tensors[name].isfinite().all()):
                raise UserError(f"init.from: {name} in {path} holds values that are not finite")
            own[name].copy_(tensors[name])
    notice = personal_notice(facts_of(path))
    notices = [f"{path}: {notice}"] if notice else []
    start = f"{len(fitting)} of {len(own)} tensors of the model start from {path}"
    return Initial(content, [start, *differences, *notices])


def _fits(own: Tensor, given: Tensor) -> bool:
    return own.shape == given.shape and own.is_floating_point() == given.is_floating_point()
