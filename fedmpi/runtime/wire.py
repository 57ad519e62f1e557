"""comm.wire -> formats; what would run in one, and mean nothing, is refused."""

from __future__ import annotations

import torch

from fedmpi.common.errors import UserError
from fedmpi.config.schema import FRACTION, Down, Settings
from fedmpi.engine.messages import Messages, is_change
from fedmpi.engine.travel.gathering import Cuts
from fedmpi.flat.coding import Wire
from fedmpi.flat.formats import Format, Half, Int8, TopK
from fedmpi.method.base import means_of

SORTING = ("median", "trimmed_mean")  # rules that look at one entry of all clients


def formats(settings: Settings, dtype: torch.dtype) -> Wire:
    """The formats of uploads and downloads of a model of this type.

    Raises UserError for a model of half-precision numbers, and topk beside a rule that looks at single entries.
    """
    up, down = settings.comm.wire.up, settings.comm.wire.down
    if (up.name, down.name) != ("fp32", "fp32") and dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"comm.wire: up {up.name}, down {down.name}: the parameters of model {settings.model.name} are "
            f"{str(dtype).removeprefix('torch.')}, and only float32 and float64 travel in another format than their "
            "own; leave comm.wire out"
        )
    rule = settings.server.rule.name
    if up.name == "topk" and rule in SORTING:
        raise UserError(
            f"comm.wire.up: topk does not go with server.rule: {rule}, which compares clients entry by entry: what "
            "most of them leave out would be 0 for ever; use bf16, fp16 or int8, or another rule"
        )
    return Wire(_format(up), _format(down), up.feedback)


def check(settings: Settings, messages: Messages) -> None:
    """Raises UserError where no upload holds anything that the format is for."""
    _check_sums(settings, messages)
    form, method = messages.wire.up, messages.method
    large = [name for name, slot in method.sends.items() if messages.large(slot)]
    if form is not None and form.changes_only and large and not any(is_change(n, method.sends[n]) for n in large):
        raise UserError(
            f"comm.wire.up: {form.name} is for changes, of which a client may send the rest later; method "
            f"{settings.method.name} sends none, but {', '.join(large)}, which must arrive whole; use bf16 or fp16 "
            "(Slot(..., change=True) in a method says that what a slot holds is added to what the server has)"
        )


def _check_sums(settings: Settings, messages: Messages) -> None:
    """Raises UserError where server.reduce: local has rows to do without that somebody needs."""
    if settings.server.reduce != "local":
        return
    faults, method, means = settings.faults, settings.method.name, means_of(messages.method) or {}
    uploads = {messages.upload(t).packing for t in range(max(settings.rounds, 1))}
    sent = {name for packing in uploads for name in Cuts(packing).large} - {*means, "_b"}
    reasons = {
        f"method {method} looks at single uploads (one of your own whose aggregate reads up.mean alone says so: "
        'means = {"dw": ("p",)})': not means,
        f"method {method} looks at single {', '.join(sorted(sent))}": bool(sent),
        f"server.rule {settings.server.rule.name} looks at single uploads": settings.server.rule.name != "auto",
        f"faults.on_bad_update: {faults.on_bad_update} may leave one out": faults.on_bad_update != "abort",
        f"faults.on_client_error: {faults.on_client_error} may leave one out": faults.on_client_error != "abort",
        f"faults.on_lost_rank: {faults.on_lost_rank} may leave some out": faults.on_lost_rank != "abort",
        "data.silos are for rank 0 alone, and sums come up through other ranks": bool(settings.data.silos),
        "faults.replay may leave some out": faults.replay is not None,
        "record.updates: gram compares them": settings.record.updates == "gram",
        f"comm.wire.up: {settings.comm.wire.up.name} is for single uploads": messages.wire.up is not None,
    }
    if reason := next((text for text, bad in reasons.items() if bad), None):
        raise UserError(f"server.reduce: local sends each rank's sum alone, but {reason}; use server.reduce: root")


def _format(chosen: Down) -> Format | None:
    if chosen.name == "fp32":
        return None
    if chosen.name == "topk":
        return TopK(FRACTION if chosen.fraction is None else chosen.fraction)
    return Int8() if chosen.name == "int8" else Half(chosen.name)
