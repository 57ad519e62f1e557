"""Checks that tensors are only read: inputs of hooks, batches, frozen parameters and local buffers of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmpi.common.user_code_errors import located_error
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides

MOST = 1 << 16  # values of a tensor that are compared; of a larger one some from everywhere
REMEDY = (
    "no message carries it, so what one client leaves there would pass to the next one on its rank; let a parameter "
    "that changes require gradients, register a buffer without persistent=False, and write into buffers (copy_)"
)


class ReadOnlyCheck:
    """Detects writes to tensors that hooks may only read, as other clients or rounds would see them.

    torch counts how often a tensor, or a view of it, has been written to.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """tensors: by the names that they have in messages."""
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors.values()]

    def written(self) -> str | None:
        """Return the name of the first tensor that was written to since the check was made; None if none was."""
        if [tensor._version for tensor in self.tensors.values()] == self.versions:
            return None
        pairs = zip(self.tensors.items(), self.versions, strict=True)
        return next(name for (name, tensor), version in pairs if tensor._version != version)

    def check_hooks(self, method: Method, where: str, *hooks: str, by: Any = None) -> None:
        """Raise UserError if one of `hooks`, which were called, wrote to a tensor. by: the server rule, if it was."""
        name = self.written()
        if name is None:
            return
        own = [hook for hook in hooks if overrides(method, hook)]
        who = f"a hook of method {type(method).__name__} wrote" if hooks else "the server rule wrote"
        text = f"{where}: {who} to {name}, which hooks may only read (an operation that ends in _, or an assignment to "
        text += "[...]); make a copy, and return it as new state" + (f". It was {' or '.join(own)}" if own else "")
        raise located_error(text, *(getattr(method, hook) for hook in own[:1]), by)


class LocalTensor(NamedTuple):
    """A tensor of a model, and how its initial values are recognised."""

    name: str
    place: dict[str, Any]  # the module's, under `leaf`
    leaf: str
    tensor: Tensor
    version: int
    digest: bytes | None  # of the values; None: only whether it is the same tensor counts, as of a buffer that travels


class FrozenTensorGuard:
    """Detects changes of the tensors of a rank's model that no message carries from client to client.

    These are frozen parameters and buffers that are not persistent. Other buffers must remain the same tensors: one
    that is assigned (`self.mean = ...`) is no part of `b` any more. A write shows in torch's version counter. It may
    restore the same values, as of a table of positions that each pass makes, so values are compared then; and at the
    checks 1, 2, 4, 8, ..., as writes through `.data` are not counted.
    """

    def __init__(self, model: FlatModel) -> None:
        self.module, self.tensors, self.checks = model.module, list[LocalTensor](), 0
        frozen = {id(p) for p in model.frozen.values()}
        for path, owner in model.module.named_modules():
            places: list[tuple[dict[str, Any], str, bool]]
            places = [(owner._parameters, leaf, True) for leaf, p in owner._parameters.items() if id(p) in frozen]
            places += [(owner._buffers, leaf, leaf in owner._non_persistent_buffers_set) for leaf in owner._buffers]
            for place, leaf, compared in places:
                tensor = place[leaf]
                if tensor is not None:  # else some pass makes it
                    name, digest = f"{path}.{leaf}" if path else leaf, _digest(tensor) if compared else None
                    self.tensors.append(LocalTensor(name, place, leaf, tensor, _version(tensor), digest))

    def check(self, where: str = "") -> None:
        """Raise UserError if one of them has changed, after passes that `where` (round and client) names."""
        self.checks += 1
        thorough = not self.checks & (self.checks - 1)
        for i, (name, place, leaf, tensor, version, digest) in enumerate(self.tensors):
            now = place.get(leaf)
            if now is tensor and (digest is None or (_version(now) == version and not thorough)):
                continue
            if digest is None or now is None or _digest(now) != digest:
                text = f"{name!r} of model {type(self.module).__name__} is not what it was when the model was made"
                raise located_error(f"{where}{': ' if where else ''}{text}: {REMEDY}", self.module)
            self.tensors[i] = LocalTensor(name, place, leaf, now, _version(now), digest)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # in inference mode writes are not counted


def _digest(tensor: Tensor) -> bytes | None:
    """Return a digest of type, shape and a sample of the values; None if these cannot be read (sparse, vmap's)."""
    try:
        flat = tensor.detach().reshape(-1)
        some = flat[:: -(-len(flat) // MOST) | 1].cpu().contiguous().view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + some.numpy().tobytes()).digest()
