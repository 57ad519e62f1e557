"""Checks that hooks return what the method declares, and do not write to tensors that they may only read."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Samples, describe_samples
from fedmpi.common.metrics_row import RESERVED_NAMES
from fedmpi.common.text import suggest_name
from fedmpi.common.user_code_errors import (
    describe_source_location,
    explain_known_error,
    find_user_line,
    make_located_error,
)
from fedmpi.flat.model import FlatModel
from fedmpi.flat.packing import Packing
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import SlotValues, State
from fedmpi.method.slots import Slots

UNCHANGED = {  # hook -> hint for state that does not change
    "aggregate": "; return server.state for state that stays as it was",
    "train, upload": "; return client.state for state that stays as it was",
}
SAMPLE = 1 << 16  # number of a tensor's values that are compared; of larger tensors a regular sample
NOT_SENT = (
    "no message carries it, so what one client leaves there would pass to the next one on its rank; let a parameter "
    "that changes require gradients, register a buffer without persistent=False, and write into buffers (copy_)"
)


# ---- results of hooks ----
def wrong(method: Method, hook: str, where: str, text: str, by: Any = None) -> UserError:
    """Return the error `round 0, client 0: method Mine, hook loss TEXT (Mine.loss at mine.py:12)`.

    `by` is the function that was called, if it is not the method's own hook.
    """
    own = getattr(method, hook.partition(",")[0].rstrip(":"), None)
    return make_located_error(f"{where}: method {type(method).__name__}, hook {hook} {text}", by or own, type(method))


def check_slots(
    method: Method,
    hook: str,
    given: Any,
    declared: Collection[str],
    packing: Packing,
    where: str,
    like: Tensor,
    due: Collection[str] | None = None,
) -> None:
    """Raise UserError if a hook did not return the slots that the method declares.

    Values must be dense tensors of real numbers with the declared shapes; for shape () a number is permitted, too.

    Args:
        given: the result of the hook.
        declared: the slots that it may return.
        where: round and client, for the message.
        like: any tensor on the device of the values.
        due: the slots that it must return; by default all that are declared.
    """
    if not isinstance(given, Mapping):
        raise wrong(
            method, hook, where, f"returned {type(given).__name__}; it must return SlotValues(...) or State(...)"
        )
    for name in given:
        if name not in declared:
            text = f"returned slot {name!r}, which is not declared; {suggest_name(str(name), declared)}"
            raise wrong(method, hook, where, text)
    missing = [name for name in (declared if due is None else due) if name not in given]
    if missing:
        raise wrong(method, hook, where, f"left out the declared slot {missing[0]!r}{UNCHANGED.get(hook, '')}")
    for name, value in given.items():
        if name not in packing.shapes or (packing.shapes[name] == () and isinstance(value, (int, float))):
            continue
        text = mismatch(value, packing.shapes[name], ("cpu", like.device.type), floats=False)
        if text:
            text = text.removeprefix("shape ")
            raise wrong(method, f"{hook}:", where, f"slot {name!r} is {packing.shapes[name]}, but it returned {text}")


def check_hook_returns(client: Any, states: Mapping[str, Any], sent: Any) -> None:
    """Raise UserError, which names hook and slot, if a client's hooks did not return what the method declares.

    `states` maps hooks to the client states that they returned; `sent` is the row that `upload` returned.
    """
    method, messages = client.trainer.method, client.trainer.messages
    upload, declared = messages.upload_layout(client.round).packing, method.client_state
    due = [name for name in upload.shapes if name in method.sends and name != "dw"]
    if (
        type(sent) is SlotValues
        and not (sent or due or declared)
        and all(type(s) is State and not s for s in states.values())
    ):
        return  # the usual case: nothing is declared, and nothing was returned
    check_slots(method, "upload", sent, method.sends, upload, client.where, client.w, due)
    returned = dict[str, Any]()
    for hook, new in states.items():
        check_slots(method, hook, new, declared, messages.client_state, client.where, client.w, ())
        if twice := returned.keys() & new.keys():
            text = f"returned slot {min(twice)!r}, which an earlier hook returned, too; return it from one of them"
            raise wrong(method, hook, client.where, text)
        returned |= new
    check_slots(method, "train, upload", returned, declared, messages.client_state, client.where, client.w)


def are_finite(rows: Sequence[Tensor], sums: Sequence[Tensor] | None = None) -> list[bool]:
    """Return for each row whether all of its entries are finite.

    The sums of the rows are tested, with one transfer per device. A sum of finite numbers can be infinite, so all
    entries of a row with such a sum are tested.

    Args:
        sums: the sums of the rows, if they were computed before.
    """
    sums = [row.sum() for row in rows] if sums is None else sums
    values = [0.0] * len(sums)
    for device in {x.device for x in sums}:
        places = [i for i, x in enumerate(sums) if x.device == device]
        for i, value in zip(places, torch.stack([sums[i] for i in places]).tolist(), strict=True):
            values[i] = value
    return [math.isfinite(value) or bool(row.isfinite().all()) for row, value in zip(rows, values, strict=True)]


def check_finite(method: Method, hook: str, packing: Packing, row: Tensor, where: str) -> None:
    """Raise UserError if a row that is kept or sent contains nan or inf, which would affect the rest of the run."""
    if are_finite([row])[0]:
        return
    views = packing.views(row)
    slot = next(name for name in views if not bool(getattr(views, name).isfinite().all()))
    what = "the client's own part of the model" if slot.startswith("_") else f"slot {slot!r}"
    text = f"gave values that are not finite (nan or inf) in {row.dtype}: {what} is; the usual cause is divergence: "
    raise wrong(method, hook, where, f"{text}lower train.lr")


def check_pair(method: Method, hook: str, given: Any, where: str) -> tuple[Any, Any]:
    """Return the result of a hook if it is a pair; otherwise raise UserError."""
    if not isinstance(given, tuple) or len(given) != 2:
        needed = "SlotValues(...), State(...)" if hook == "upload" else "direction, State(...)"
        raise wrong(method, hook, where, f"returned {type(given).__name__}; it must return the pair {needed}")
    return given


def check_tensor(
    method: Method, hook: str, value: Any, shape: tuple[int, ...], where: str, like: Tensor, by: Any = None
) -> None:
    """Raise UserError if a hook did not return a tensor of this shape; shape (1,), for example, would fill all entries.

    Args:
        like: any tensor on the device of the value.
        by: the function that returned the value, if it is not the method's own hook.
    """
    text = mismatch(value, shape, (like.device.type,))
    if text:
        raise wrong(method, hook, where, f"returned {text}; it must return a tensor {shape} of floats", by)


def mismatch(value: Any, shape: tuple[int, ...], devices: Sequence[str], floats: bool = True) -> str:
    """Describe why a value is not a dense tensor of real numbers with this shape; return "" if it is one."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.shape != shape:
        return f"shape {tuple(value.shape)}"
    if value.layout is not torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if not value.is_floating_point() if floats else value.is_complex():
        return f"a tensor of {value.dtype}"
    return "" if value.device.type in devices else f"a tensor on {value.device}"


def not_passed(module: nn.Module, x: Samples, error: Exception) -> Exception:
    """Return the error to raise for a failed forward pass; it names the model unless a user's file failed."""
    if find_user_line(error) or isinstance(error, (MemoryError, UserError)) or explain_known_error(error):
        return error
    name, place = type(module).__name__, describe_source_location(module)
    text = f"model {name} fails on a batch of {describe_samples(x)}: {type(error).__name__}: {error}"
    return UserError(f"{text} ({place})" if place else text)


def check_metric_names(method: Method, figures: Collection[str], metrics: Collection[str], where: str) -> None:
    """Raise UserError if a metric that the method reports has the name of another key of a row of metrics.jsonl."""
    for name in figures:
        if name in RESERVED_NAMES or name in metrics:
            text = f"figures({name}=...) has the name of another key of a row of metrics.jsonl; choose another"
            raise wrong(method, "aggregate:", where, text)


def check_declarations(method: Method) -> None:
    """Raise UserError if a declaration of a method has the wrong type or names a slot or hook that does not exist."""
    text = f"method {type(method).__name__}"
    for name in ("client_state", "server_state", "per_client_download", "sends", "accumulators"):
        slots = getattr(method, name)
        if not isinstance(slots, Slots):
            raise UserError(f"{text}: {name} is {type(slots).__name__}; it must be Slots(...)")
        for slot, start in ((slot, each.start) for slot, each in slots.items() if isinstance(each.start, str)):
            hook = name == "server_state"
            if start not in numbers(method) and not (hook and callable(getattr(method, start, None))):
                needed = f"an option that is a number{', or a hook f(self, shape, generator)' if hook else ''}"
                raise UserError(f"{text}, {name}: slot {slot!r} starts at {start!r}, which is not {needed}")
    if isinstance(method.receives, str) or not {*method.receives} <= {*method.server_state}:
        slots = ", ".join(method.server_state) or "none are declared"
        raise UserError(f"{text}: receives is {method.receives!r}; it must be a tuple of server_state's slots: {slots}")


def numbers(method: Method) -> dict[str, float]:
    """Return name -> value of the method's options that are numbers."""
    names: list[str] = [f.name for f in fields(method)] if is_dataclass(method) else []
    options = {name: getattr(method, name) for name in names}
    return {n: value for n, value in options.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}


# ---- inputs of hooks ----
class ReadOnlyCheck:
    """Detects writes to tensors that hooks may only read, because other clients or rounds use the same tensors.

    It compares the version counters of torch, which count the writes to a tensor and its views.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Create the check of these tensors, by the names that messages use for them."""
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors.values()]

    def written(self) -> str | None:
        """Return the name of the first tensor that was written to since this object was created, or None."""
        if [tensor._version for tensor in self.tensors.values()] == self.versions:
            return None
        pairs = zip(self.tensors.items(), self.versions, strict=True)
        return next(name for (name, tensor), version in pairs if tensor._version != version)

    def check_hooks(self, method: Method, where: str, *hooks: str, by: Any = None) -> None:
        """Raise UserError if one of `hooks`, which were called, or the server rule `by` wrote to a tensor."""
        name = self.written()
        if name is None:
            return
        own = [hook for hook in hooks if overrides(method, hook)]
        who = f"a hook of method {type(method).__name__} wrote" if hooks else "the server rule wrote"
        text = f"{where}: {who} to {name}, which hooks may only read (an operation that ends in _, or an assignment to "
        text += "[...]); make a copy, and return it as new state" + (f". It was {' or '.join(own)}" if own else "")
        raise make_located_error(text, *(getattr(method, hook) for hook in own[:1]), by)


class FrozenTensorGuard:
    """Detects changes of tensors of a rank's model that are not part of any message.

    These are frozen parameters and buffers that are not persistent: their values must not change. Other buffers must
    remain the same tensor objects: after an assignment (`self.mean = ...`) the new tensor would not be part of `b`.
    Tensors are compared after the passes 1, 2, 4, 8, ... of training, and of evaluation.
    """

    def __init__(self, model: FlatModel) -> None:
        self.module, self.passes = model.module, Counter[bool]()
        self.frozen = {id(p) for p in model.frozen.values()}
        self.initial = self._look()

    def _look(self) -> dict[str, Any]:
        """Return name -> a digest of the tensor's values, or the tensor itself if only its identity matters."""
        found = dict[str, Any]()
        for path, owner in self.module.named_modules():
            for leaf, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                compared = leaf in owner._non_persistent_buffers_set or id(tensor) in self.frozen
                if compared or leaf in owner._buffers:
                    found[f"{path}.{leaf}" if path else leaf] = _digest(tensor) if compared else tensor
        return found

    def check(self, where: str = "") -> None:
        """Raise UserError if a tensor has changed.

        Args:
            where: round and client after whose training this is called; "" after an evaluation.
        """
        self.passes[bool(where)] += 1
        if self.passes[bool(where)] & (self.passes[bool(where)] - 1):
            return
        now = self._look()
        for name, before in self.initial.items():
            after = now.get(name)
            same = after is before if isinstance(before, Tensor) else after == before
            if before is not None and not same:  # tensors that did not exist at first are created by a forward pass
                text = f"{name!r} of model {type(self.module).__name__} is not what it was when the model was made"
                raise make_located_error(f"{where}{': ' if where else ''}{text}: {NOT_SENT}", self.module)


def _digest(tensor: Tensor | None) -> bytes | None:
    """Return a digest of type, shape and a sample of values; None if these cannot be read (sparse, vmap)."""
    if tensor is None:
        return None
    try:
        flat = tensor.detach().reshape(-1)
        some = flat[:: -(-len(flat) // SAMPLE) | 1].cpu().contiguous().view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + some.numpy().tobytes()).digest()
