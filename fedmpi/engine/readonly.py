"""Checks that tensors are only read: inputs of hooks, batches, frozen parameters and local buffers of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import located_error
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides

MOST = 1 << 16  # values of a tensor that are compared; of a larger one some from everywhere
WHY = "it does not travel, and what one client leaves there would pass to the next one on its rank"


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
        raise located_error(
            f"{where}: {who} to {name}, which hooks may only read (an operation that ends in _, or an "
            f"assignment to [...]); make a copy, and return it as new state"
            + (f". It was {' or '.join(own)}" if own else ""),
            *(getattr(method, hook) for hook in own[:1]),
            by,
        )


@dataclass
class FrozenTensor:
    """A tensor of a model, and how its initial values are recognised."""

    name: str
    kind: str  # "parameter" or "buffer"; "" if it travels
    place: dict[str, Tensor | None]  # the module's, under `leaf`
    leaf: str
    tensor: Tensor
    mark: tuple[int, int]
    values: bytes | None  # None: they cannot be read, or do not matter

    def differs(self, thorough: bool) -> bool:
        now = self.place.get(self.leaf)
        if now is self.tensor and not (thorough and self.values) and _mark(now, self.kind) == self.mark:
            return False
        if not self.kind or now is None:
            return now is not self.tensor or _mark(now, self.kind) != self.mark
        if _values(now) != self.values:
            return True
        self.tensor, self.mark = now, _mark(now, self.kind)
        return False


class FrozenTensorGuard:
    """Detects changes of the tensors of a rank's model that no message carries from client to client.

    These are frozen parameters and buffers that are not persistent. Other buffers must remain the same tensors: one
    that is assigned (`self.mean = ...`) is no part of `b` any more. A write shows in torch's version counter or in
    the address of the memory. It may restore the same values, as of a table of positions that each pass makes, so
    values are compared before an error is raised. Writes through `.data` are not counted, so values are compared
    from time to time, too.
    """

    def __init__(self, model: FlatModel) -> None:
        self.module, self.checks, self.tensors = model.module, 0, list[FrozenTensor]()
        frozen = {id(p) for p in model.frozen.values()}
        for path, owner in model.module.named_modules():
            parameters: dict[str, Tensor | None] = owner._parameters
            found = [(parameters, leaf, "parameter") for leaf, p in parameters.items() if id(p) in frozen]
            for leaf in owner._buffers:
                found.append((owner._buffers, leaf, "buffer" if leaf in owner._non_persistent_buffers_set else ""))
            for place, leaf, kind in found:
                tensor, name = place[leaf], f"{path}.{leaf}" if path else leaf
                if tensor is not None:  # a buffer that is None yet is made by some pass, as only it knows how
                    values = _values(tensor) if kind else None
                    self.tensors.append(FrozenTensor(name, kind, place, leaf, tensor, _mark(tensor, kind), values))

    def check(self, where: str = "") -> None:
        """Raise UserError if one of them has changed, after passes that `where` (round and client) names."""
        self.checks += 1
        thorough = not self.checks & (self.checks - 1)  # 1, 2, 4, 8 ...
        for frozen in self.tensors:
            if frozen.differs(thorough):
                raise self._error(frozen, where)

    def _error(self, frozen: FrozenTensor, where: str) -> UserError:
        name, of = f"{where}: {frozen.name!r}" if where else repr(frozen.name), f"of model {type(self.module).__name__}"
        if not frozen.kind:
            text = (
                f"{name}, a buffer {of}, is another tensor than when the model was made, by self.{frozen.leaf} = ... "
                "or .data = ...: what travels would be the old one; write into it: "
                f"self.{frozen.leaf}.copy_(...)"
            )
        elif frozen.kind == "parameter":
            text = (
                f"{name}, a frozen parameter {of} (requires_grad False), is not what it was when the model was made: "
                f"{WHY}; make it a buffer (register_buffer), which travels and is averaged"
            )
        else:
            text = (
                f"{name}, a buffer {of} that is not persistent, is not what it was when the model was made: {WHY}; "
                "leave out persistent=False (a float buffer travels and is averaged, an integer one starts anew with "
                "each client), or keep it in no buffer, and make it in each pass"
            )
        return located_error(text, self.module)


def _mark(tensor: Tensor, kind: str) -> tuple[int, int]:
    """Return the address of a tensor, and its version if it matters and is counted (not in inference mode)."""
    try:
        return tensor.data_ptr(), tensor._version if kind and not tensor.is_inference() else 0
    except RuntimeError:  # it has no memory of its own: sparse, or a tensor of vmap's that was left behind
        return 0, 0


def _values(tensor: Tensor) -> bytes | None:
    """Return a digest of a tensor's type, shape and a regular sample of its values; None if these cannot be read."""
    try:
        flat = tensor.detach().reshape(-1)
        some = flat[:: -(-len(flat) // MOST) | 1].cpu().contiguous().view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + some.numpy().tobytes()).digest()
