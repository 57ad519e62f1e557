"""Weights to start from: those of another run, or of a file of safetensors, by the names of `state_dict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.runtime import rank_agreement
from fedmpi.runtime.record.saved_model import facts_of, personal_notice

MODEL, COPY = "model.safetensors", "initial.safetensors"  # in a run directory
SHOWN = 6  # names in a line


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
    content, tensors = _read(path, source)
    own = module.state_dict()
    fitting = [name for name in own if name in tensors and _fits(own[name], tensors[name])]
    shapes = [
        f"{name} {tuple(own[name].shape)}, in the file {tensors[name].dtype} {tuple(tensors[name].shape)}"
        for name in own
        if name in tensors and name not in fitting
    ]
    parts = [
        ("of another shape or type", shapes),
        ("only in the file", [name for name in tensors if name not in own]),
        ("as the seed made them", [name for name in own if name not in fitting]),
    ]
    differences = [f"{what}: {_some(names)}" for what, names in parts if names]
    if not fitting:
        raise UserError(
            f"init.from: nothing in {path} has name and shape of a tensor of the model; {'; '.join(differences)}"
        )
    if strict and differences:
        raise UserError(f"init.strict: {path} and the model differ; {'; '.join(differences)}")
    with torch.no_grad():
        for name in fitting:
            if not bool(tensors[name].isfinite().all()):
                raise UserError(f"init.from: {name} in {path} holds values that are not finite")
            own[name].copy_(tensors[name])
    notices = [f"{path}: {notice}" for notice in [personal_notice(facts_of(path))] if notice]
    return Initial(
        content, [f"{len(fitting)} of {len(own)} tensors of the model start from {path}", *differences, *notices]
    )


def _read(path: Path, source: Path) -> tuple[bytes, dict[str, Tensor]]:
    if source.is_dir() and not path.is_file():
        raise UserError(f"init.from: {source} holds no {MODEL}: no run, or one that has not ended (well)")
    try:
        content = path.read_bytes()
        return content, load(content)
    except OSError as error:
        raise UserError(
            f"init.from: {path}: {error.strerror}; a run directory or a .safetensors file is needed"
        ) from error
    except (SafetensorError, ValueError) as error:
        raise UserError(
            f"init.from: {path} is no whole file of safetensors ({error}). Save a state_dict with "
            "safetensors.torch.save_file(model.state_dict(), PATH)"
        ) from error


def _fits(own: Tensor, given: Tensor) -> bool:
    return own.shape == given.shape and own.is_floating_point() == given.is_floating_point()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
