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

UNCHANGED_STATE_HINTS = {  # hook -> hint for slots that do not change
    "aggregate": "; for slots that do not change return server.state",
    "train, upload": "; for slots that do not change return client.state",
}
MAX_COMPARED_VALUES = 1 << 16  # of larger tensors only this many evenly spaced values are compared
NOT_SENT_REMEDY = (
    "it is not part of any message, so the next client of this rank would start with the value that the previous one "
    "left; let a parameter that changes require gradients, register a buffer without persistent=False, and write into "
    "buffers (copy_)"
)


METHODS_WITH_PRIVATE_STEPS = "a method whose clients read samples only in steps, such as fedavg, fedprox or scaffold"
DIVERGENCE_HINT = "the usual cause is divergence: lower train.lr"


# ---- results of hooks ----
def hook_error(method: Method, hook: str, where: str, text: str, by: Any = None) -> UserError:
    """Build the error `round 0, client 0: method Mine, hook loss TEXT (Mine.loss at mine.py:12)`.

    Args:
        where: round and client, such as "round 0, client 0".
        text: a description of the mistake, which follows the name of the hook.
        by: the function that the message names, if the mistake is not in the method's own hook.
    """
    own = getattr(method, hook.partition(",")[0].rstrip(":"), None)
    return make_located_error(f"{where}: method {type(method).__name__}, hook {hook} {text}", by or own, type(method))


def require_unprotected_samples(client: Any, member: str) -> None:
    """Raise UserError if a hook reads a client's samples outside of steps although differential privacy protects them.

    Args:
        client: the client.
        member: its function or attribute that the hook uses.
    """
    if client.trainer.private_steps is not None:
        raise UserError(
            f"{client.where}: method {type(client.trainer.method).__name__} uses client.{member}, which reads the "
            "client's samples outside of its steps, so that the result has no noise; with privacy.dp.unit: sample "
            f"choose {METHODS_WITH_PRIVATE_STEPS}, or set privacy.dp.unit: client"
        )


def check_slots(
    method: Method,
    hook: str,
    result: Any,
    declared: Collection[str],
    packing: Packing,
    where: str,
    like: Tensor,
    required: Collection[str] | None = None,
) -> None:
    """Raise UserError if a hook did not return the slots that the method declares.

    Values must be dense tensors of real numbers with the declared shapes; for shape () a number is permitted, too.

    Args:
        result: what the hook returned.
        declared: the slots that the hook may return.
        packing: the layout that defines the shapes of the slots.
        where: the round and client, for the error message.
        like: any tensor on the device on which the values must be.
        required: the slots that the hook must return; by default all declared ones.
    """
    if not isinstance(result, Mapping):
        raise hook_error(
            method, hook, where, f"returned {type(result).__name__}; it must return SlotValues(...) or State(...)"
        )
    for name in result:
        if name not in declared:
            text = f"returned slot {name!r}, which is not declared; {suggest_name(str(name), declared)}"
            raise hook_error(method, hook, where, text)
    missing = [name for name in (declared if required is None else required) if name not in result]
    if missing:
        text = f"did not return the declared slot {missing[0]!r}{UNCHANGED_STATE_HINTS.get(hook, '')}"
        raise hook_error(method, hook, where, text)
    for name, value in result.items():
        if name not in packing.shapes or (packing.shapes[name] == () and isinstance(value, (int, float))):
            continue
        text = describe_mismatch(value, packing.shapes[name], ("cpu", like.device.type), floats=False)
        if text:
            text = text.removeprefix("shape ")
            text = f"slot {name!r} must have shape {packing.shapes[name]}, but it returned {text}"
            raise hook_error(method, f"{hook}:", where, text)


def check_hook_returns(client: Any, states: Mapping[str, Any], sent: Any) -> None:
    """Raise UserError if a client's hooks did not return what the method declares; the error names hook and slot.

    Args:
        states: name of a hook -> the client state that this hook returned.
        sent: the slots that the hook `upload` returned.
    """
    method, messages = client.trainer.method, client.trainer.messages
    upload, declared = messages.upload_layout(client.round).packing, method.client_state
    required = [name for name in upload.shapes if name in method.sends and name != "dw"]
    if (
        type(sent) is SlotValues
        and not (sent or required or declared)
        and all(type(s) is State and not s for s in states.values())
    ):
        return  # the usual case: nothing is declared, and nothing was returned
    check_slots(method, "upload", sent, method.sends, upload, client.where, client.w, required)
    returned = dict[str, Any]()
    for hook, new in states.items():
        check_slots(method, hook, new, declared, messages.client_state, client.where, client.w, ())
        if twice := returned.keys() & new.keys():
            text = (
                f"returned slot {min(twice)!r}, which an earlier hook has also returned; return it from only one hook"
            )
            raise hook_error(method, hook, client.where, text)
        returned |= new
    check_slots(method, "train, upload", returned, declared, messages.client_state, client.where, client.w)


def are_finite(rows: Sequence[Tensor], sums: Sequence[Tensor] | None = None) -> list[bool]:
    """Return for each row whether all of its entries are finite.

    Only the sum of each row is copied to the CPU and tested. If it is not finite, all entries of the row are tested,
    because a sum of finite numbers can overflow.

    Args:
        rows: tensors of any shape.
        sums: the sums of the rows, if the caller has computed them.
    """
    sums = [row.sum() for row in rows] if sums is None else sums
    values = [0.0] * len(sums)
    for device in {x.device for x in sums}:
        indices = [i for i, x in enumerate(sums) if x.device == device]
        for i, value in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            values[i] = value
    return [math.isfinite(value) or bool(row.isfinite().all()) for row, value in zip(rows, values, strict=True)]


def check_finite(method: Method, hook: str, packing: Packing, row: Tensor, where: str) -> None:
    """Raise UserError if a state row or message row contains nan or inf, which would corrupt the rest of the run."""
    if are_finite([row])[0]:
        return
    views = packing.views(row)
    slot = next(name for name in views if not bool(getattr(views, name).isfinite().all()))
    what = "the client's own part of the model" if slot.startswith("_") else f"slot {slot!r}"
    text = f"returned values that are not finite (nan or inf, in {row.dtype}) in {what}; {DIVERGENCE_HINT}"
    raise hook_error(method, hook, where, text)


def check_pair(method: Method, hook: str, result: Any, where: str) -> tuple[Any, Any]:
    """Raise UserError if the result of a hook is not a pair; return the pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        needed = "SlotValues(...), State(...)" if hook == "upload" else "direction, State(...)"
        raise hook_error(method, hook, where, f"returned {type(result).__name__}; it must return the pair {needed}")
    return result


def check_tensor(
    method: Method, hook: str, value: Any, shape: tuple[int, ...], where: str, like: Tensor, by: Any = None
) -> None:
    """Raise UserError if a hook did not return a float tensor of exactly this shape.

    Torch would broadcast other shapes without an error; a tensor of shape (1,), for example, would fill all entries.

    Args:
        value: what the hook returned.
        shape: the required shape.
        where: the round and client, for the error message.
        like: any tensor on the device on which the value must be.
        by: the function that returned the value, if it is not the method's own hook.
    """
    text = describe_mismatch(value, shape, (like.device.type,))
    if text:
        raise hook_error(method, hook, where, f"returned {text}; it must return a tensor {shape} of floats", by)


def describe_mismatch(value: Any, shape: tuple[int, ...], devices: Sequence[str], floats: bool = True) -> str:
    """Describe why a value is not a dense real tensor of this shape on one of these devices; "" if it is one.

    floats: whether it must be a floating-point tensor; otherwise it may also contain integers or booleans.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.shape != shape:
        return f"shape {tuple(value.shape)}"
    if value.layout is not torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if not value.is_floating_point() if floats else value.is_complex():
        return f"a tensor of {value.dtype}"
    return "" if value.device.type in devices else f"a tensor on {value.device}"


def forward_error(module: nn.Module, x: Samples, error: Exception) -> Exception:
    """Return the error to raise if a forward pass has failed: a UserError that names the model and its input.

    Errors that need no such context are returned unchanged: errors raised in a user's file, UserError, MemoryError, and
    errors with a known remedy.
    """
    if find_user_line(error) or isinstance(error, (MemoryError, UserError)) or explain_known_error(error):
        return error
    name, place = type(module).__name__, describe_source_location(module)
    text = f"model {name} failed on a batch of {describe_samples(x)}: {type(error).__name__}: {error}"
    return UserError(f"{text} ({place})" if place else text)


def check_no_metric_name_clash(
    method: Method, names: Collection[str], task_metrics: Collection[str], where: str
) -> None:
    """Raise UserError if a metric that the method logs has the name of an existing key of metrics.jsonl."""
    for name in names:
        if name in RESERVED_NAMES or name in task_metrics:
            text = f"log_metrics({name}=...): {name!r} is already a key in metrics.jsonl; choose another name"
            raise hook_error(method, "aggregate:", where, text)


def check_declarations(method: Method) -> None:
    """Raise UserError if a declaration of a method has the wrong type, or names an unknown slot or function."""
    text = f"method {type(method).__name__}"
    for name in ("client_state", "server_state", "per_client_download", "sends", "accumulators"):
        slots = getattr(method, name)
        if not isinstance(slots, Slots):
            raise UserError(f"{text}: {name} is of type {type(slots).__name__}; it must be Slots(...)")
        for slot, start in ((slot, each.start) for slot, each in slots.items() if isinstance(each.start, str)):
            allows_function = name == "server_state"
            if start in numeric_options(method) or (allows_function and callable(getattr(method, start, None))):
                continue
            needed = "the name of a numeric option" + (" or of a function f(self, shape, generator)" * allows_function)
            raise UserError(f"{text}, {name}: slot {slot!r} has start={start!r}; it must be a number, or {needed}")
    if isinstance(method.receives, str) or not {*method.receives} <= {*method.server_state}:
        slots = ", ".join(method.server_state) or "none are declared"
        raise UserError(
            f"{text}: receives is {method.receives!r}; it must be a tuple of slots of server_state: {slots}"
        )


def numeric_options(method: Method) -> dict[str, float]:
    """Return the values of the method's options that are numbers, by name."""
    names: list[str] = [f.name for f in fields(method)] if is_dataclass(method) else []
    options = {name: getattr(method, name) for name in names}
    return {n: value for n, value in options.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}


# ---- inputs of hooks ----
class ReadOnlyCheck:
    """Detects writes to tensors that hooks may only read, because other clients or rounds use the same tensors.

    It compares torch's version counters, which count the in-place writes to a tensor and its views.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Start to watch `tensors`, a dict from names (used in error messages) to tensors."""
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors.values()]

    def find_write(self) -> str | None:
        """Return the name of a tensor that was written to since this object was created, or None."""
        if [tensor._version for tensor in self.tensors.values()] == self.versions:
            return None
        pairs = zip(self.tensors.items(), self.versions, strict=True)
        return next(name for (name, tensor), version in pairs if tensor._version != version)

    def raise_if_written(self, method: Method, where: str, *hooks: str, by: Any = None) -> None:
        """Raise UserError if a tensor was written to.

        Args:
            where: the round and client, for the error message.
            hooks: the names of the hooks that were called since this object was created.
            by: the server rule, if a rule was called in place of hooks.
        """
        name = self.find_write()
        if name is None:
            return
        own = [hook for hook in hooks if overrides(method, hook)]
        writer = f"a hook of method {type(method).__name__}" if hooks else "the server rule"
        if own:
            writer += f" ({' or '.join(own)})"
        text = f"{where}: {writer} wrote to {name}, which is read-only; do not use operations that end in _ or "
        text += "assignments to [...] on it, but make a copy, and return the copy as new state"
        raise make_located_error(text, *(getattr(method, hook) for hook in own[:1]), by)


class UnsentTensorGuard:
    """Detects changes to tensors of a rank's model that are not part of any message.

    Such tensors are frozen parameters and non-persistent buffers; their values must not change. All other buffers must
    remain the same tensor objects, because after an assignment (`self.mean = ...`) the new tensor would not be part of
    the buffers `b` that are sent. Tensors are compared after passes 1, 2, 4, 8, ... of training, and after the
    same passes of evaluation.
    """

    def __init__(self, model: FlatModel, changing: Collection[Tensor] = ()) -> None:
        """Remember the present values of all such tensors except those in `changing`, which the server changes."""
        self.module, self.passes = model.module, Counter[bool]()
        self.frozen = {id(p) for p in model.frozen.values()} - {id(p) for p in changing}
        self.initial = self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        """Return, by name, what must not change: a hash of a tensor's values, or the tensor object itself.

        The object is returned for buffers whose values may change but which must not be replaced.
        """
        tensors = dict[str, Any]()
        for path, owner in self.module.named_modules():
            for leaf, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                compared = leaf in owner._non_persistent_buffers_set or id(tensor) in self.frozen
                if compared or leaf in owner._buffers:
                    tensors[f"{path}.{leaf}" if path else leaf] = _hash_tensor(tensor) if compared else tensor
        return tensors

    def check(self, where: str = "") -> None:
        """Raise UserError if a tensor has changed.

        Args:
            where: the round and client, for the error message; "" after an evaluation.
        """
        self.passes[bool(where)] += 1
        if self.passes[bool(where)] & (self.passes[bool(where)] - 1):
            return
        now = self._snapshot()
        for name, before in self.initial.items():
            after = now.get(name)
            same = after is before if isinstance(before, Tensor) else after == before
            if before is not None and not same:  # tensors that did not exist at first are created by a forward pass
                text = f"{name!r} of model {type(self.module).__name__} has changed since the model was created"
                raise make_located_error(f"{where}{': ' if where else ''}{text}: {NOT_SENT_REMEDY}", self.module)


def _hash_tensor(tensor: Tensor | None) -> bytes | None:
    """Return a hash of dtype, shape and some of the values; None if they cannot be read (sparse, or under vmap)."""
    if tensor is None:
        return None
    try:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: -(-len(flat) // MAX_COMPARED_VALUES) | 1].cpu().contiguous().view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + sample.numpy().tobytes()).digest()
