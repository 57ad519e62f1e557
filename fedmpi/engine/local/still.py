"""What a model holds beside `w`, `b` and its counters stays what it is: nothing carries it from client to client, and
nothing takes it back, so that what is written there would pass to whoever this rank trains next.

Frozen parameters, buffers that are not persistent. Those that travel must stay the tensors that they are: one that is
assigned anew (`self.mean = ...`) is no part of `b` any more. A write is seen by torch's count of them, and by the
place in memory; it may say again what was there, as a table of positions that each pass makes, so values are compared
before anybody is told. A write through `.data` is not counted: the values are looked at now and then in any case.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedmpi.common.blame import told
from fedmpi.common.errors import UserError
from fedmpi.flat.model import FlatModel

MOST = 1 << 16  # values of a tensor that are compared; of a larger one some from everywhere
WHY = "it does not travel, and what one client leaves there would pass to the next one on its rank"


@dataclass
class Held:
    """One tensor, as it was last seen to be what it has been from the start."""

    name: str
    what: str  # "": it travels
    place: dict[str, Tensor | None]  # the module's, under `leaf`
    leaf: str
    tensor: Tensor
    mark: tuple[int, int]
    values: bytes | None  # None: they cannot be read, or do not matter

    def differs(self, thorough: bool) -> bool:
        now = self.place.get(self.leaf)
        if now is self.tensor and not (thorough and self.values) and _mark(now, self.what) == self.mark:
            return False
        if not self.what or now is None:
            return now is not self.tensor or _mark(now, self.what) != self.mark
        if _values(now) != self.values:
            return True
        self.tensor, self.mark = now, _mark(now, self.what)
        return False


class Still:
    """Of one rank's model, from when this was made."""

    def __init__(self, model: FlatModel) -> None:
        self.module, self.checks = model.module, 0
        frozen = {id(p) for p in model.frozen.values()}
        self.held = [
            _held(f"{path}.{leaf}" if path else leaf, what, place, leaf)
            for path, owner in model.module.named_modules()
            for place, leaf, what in _of(owner, frozen)
        ]

    def check(self, where: str = "") -> None:
        """All of it is as it was, after passes that `where` (round and client) names. Raises UserError."""
        self.checks += 1
        thorough = not self.checks & (self.checks - 1)  # 1, 2, 4, 8 ...
        for held in self.held:
            if held.differs(thorough):
                raise self._told(held, where)

    def _told(self, held: Held, where: str) -> UserError:
        name, of = f"{where}: {held.name!r}" if where else repr(held.name), f"of model {type(self.module).__name__}"
        if not held.what:
            said = (
                f"{name}, a buffer {of}, is another tensor than when the model was made, by self.{held.leaf} = ... or "
                f".data = ...: what travels would be the old one; write into it: self.{held.leaf}.copy_(...)"
            )
        elif held.what == "parameter":
            said = (
                f"{name}, a frozen parameter {of} (requires_grad False), is not what it was when the model was made: "
                f"{WHY}; make it a buffer (register_buffer), which travels and is averaged"
            )
        else:
            said = (
                f"{name}, a buffer {of} that is not persistent, is not what it was when the model was made: {WHY}; "
                "leave out persistent=False (a float buffer travels and is averaged, an integer one starts anew with "
                "each client), or keep it in no buffer, and make it in each pass"
            )
        return told(said, self.module)


def _of(owner: nn.Module, frozen: set[int]) -> list[tuple[dict[str, Tensor | None], str, str]]:
    """A module's own tensors that must stay: where they are, under which name, what they are if they do not travel.
    A buffer that is None yet is made by some pass, as only it knows how."""
    parameters: dict[str, Tensor | None] = owner._parameters  # type: ignore[assignment]
    loose = owner._non_persistent_buffers_set
    found = [(parameters, leaf, "parameter") for leaf, p in parameters.items() if id(p) in frozen]
    buffers = [leaf for leaf, buffer in owner._buffers.items() if buffer is not None]
    return found + [(owner._buffers, leaf, "buffer" if leaf in loose else "") for leaf in buffers]


def _held(name: str, what: str, place: dict[str, Tensor | None], leaf: str) -> Held:
    tensor = place[leaf]
    assert tensor is not None
    return Held(name, what, place, leaf, tensor, _mark(tensor, what), _values(tensor) if what else None)


def _mark(tensor: Tensor, what: str) -> tuple[int, int]:
    """Where it is, and how often it was written to, if that matters; it is not counted for one of inference mode."""
    try:
        return tensor.data_ptr(), tensor._version if what and not tensor.is_inference() else 0
    except RuntimeError:  # it has no memory of its own: sparse, or a tensor of vmap's that was left behind
        return 0, 0


def _values(tensor: Tensor) -> bytes | None:
    """What stands for its values; None where they cannot be read."""
    try:
        flat = tensor.detach().reshape(-1)
        some = flat[:: -(-len(flat) // MOST) | 1].cpu().contiguous().view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + some.numpy().tobytes()).digest()
