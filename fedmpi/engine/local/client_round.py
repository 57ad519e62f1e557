"""One client's round on its rank: load it, train it, write what it uploads and what it keeps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedmpi.common.blame import blaming, once
from fedmpi.common.errors import RankWarning
from fedmpi.engine.checks import (
    Untouched,
    are_finite,
    check_finite,
    check_hook_returns,
    check_pair,
    own_slots,
    slot_not_finite,
)
from fedmpi.engine.messages import FAILED, STOP, Upload
from fedmpi.flat.layout import Selection

ClientContext = Any  # that of context.py, which imports this
LEFT_OUT = "left out of the round (faults.on_client_error: drop)"
# Writes an upload, but for the engine's own numbers, into a row; returns the client's new state, and its loss: mean
# over the steps, None without any.
Trained = Callable[[Tensor], tuple[dict[str, Tensor], Tensor | float | None]]


def run_round(client: ClientContext, row: Tensor) -> bool:
    """Train a client for a round: write its upload into `row`, and its new state into its state row.

    Args:
        row: one row of `messages.upload(round)`. With worker.spares an error of the client is a warning and marks it.

    Returns:
        Whether the client came to no error.
    """
    began, worker, model = time.perf_counter(), client.worker, client.worker.model

    def trained(row: Tensor) -> tuple[dict[str, Tensor], Tensor | float | None]:
        model.load(client.received, client.b0)
        worker.training()
        untouched = client.untouched() if worker.hooked else Untouched(worker.method, {})
        if worker.draws:
            client.reseed()
        with blaming(client.where):
            client.set_start_weights()
            client.load_optimizer()
            untouched.check(client.where, "receive")
            new = worker.method.train(client)
            untouched.check(client.where, "train", "loss", "regularizer", "gradient", "step")
            sent, more = check_pair(worker.method, "upload", worker.method.upload(client), client.where)
            untouched.check(client.where, "upload")
        state = write_upload(
            client, row, (new, sent, more), lambda p, w0, out: torch.sub(p.take(model.w), p.take(w0), out=out)
        )
        return state, client.meter.number()

    fine = store_result(client, row, trained, began)
    # Not within `store_result`, which may leave the client out: frozen tensors are those of all clients.
    worker.still.check(client.where)
    return fine


def store_result(client: ClientContext, row: Tensor, trained: Trained, began: float) -> bool:
    """Store what the client's round leaves; return whether it came to no error.

    Args:
        row: where the client's upload is needed; where it is trained on another device, all of it is copied there
            at once.
        trained: writes the upload, but for the engine's own numbers, into the row that it is given; makes the
            client's new state, and its loss: mean over the steps, None without any.
        began: `time.perf_counter` when the client's round began.
    """
    worker, messages = client.worker, client.worker.messages
    upload = messages.upload(client.round)
    here = row if row.device == client.w.device else client.w.new_empty(len(row))
    try:
        state, loss = trained(here)
    except Exception as error:
        if not worker.spares:
            raise
        # Its state row, too, is undone by the server's word.
        warnings.warn(RankWarning(f"{once(error, client.where)}; {LEFT_OUT}"), stacklevel=2)
        flag = STOP if worker.stop() else FAILED
        upload.tell(row.zero_(), 0.0, time.perf_counter() - began, flag)
        return False
    if len(client.state_row):
        messages.client_state.write(client.state_row, state)
    if isinstance(loss, Tensor):
        upload.packing.write(here, {"_loss": loss})
    if not _check_result(client, upload, here, row):
        loss = torch.nan  # the server refuses the upload, which undoes the round
    upload.tell(row, loss, time.perf_counter() - began, STOP if worker.stop() else 0.0)
    return True


def _check_result(client: ClientContext, upload: Upload, here: Tensor, row: Tensor) -> bool:
    """Give an upload its format, and copy it from `here` to `row` if it is needed there. Return whether all numbers
    of the client's state are finite; raise UserError if some of its upload are not.

    All of it is one question to a GPU, which answers when it has done the client's work: only then it is known how
    long that has taken, and the copy, which was asked for before, is complete.
    """
    worker, messages = client.worker, client.worker.messages
    slots = {} if worker.drop else own_slots(upload.packing, here)
    sums = [x.sum() for x in slots.values()]
    halves = messages.settle(upload, here, client.state_row)
    if here is not row:
        row.copy_(here, non_blocking=True)
    rows = [*halves.values(), *([client.state_row] if len(client.state_row) else ())]
    if not sums and not rows:
        worker.wait()
        return True
    finite = iter(are_finite([*slots.values(), *rows], [*sums, *(x.sum() for x in rows)]))
    for name in slots:
        if not next(finite):
            raise slot_not_finite(worker.method, name, client.where)
    for name in halves:
        if not next(finite):
            beyond = f"{client.where}: slot {name!r} is beyond fp16, which ends at 65,504, or not finite itclient"
            warnings.warn(RankWarning(f"{beyond}; comm.wire.up: bf16 has the range of fp32"), stacklevel=2)
    if next(finite, True):
        return True
    if not worker.drop:
        check_finite(worker.method, "train, upload", messages.client_state, client.state_row, client.where)
    return False


def write_upload(
    client: ClientContext,
    row: Tensor,
    given: tuple[Any, Any, Any],
    subtract: Callable[[Selection, Tensor, Tensor], object],
) -> dict[str, Tensor]:
    """Check what `train` and `upload` gave, write the upload; returns what becomes of the client's state.

    subtract: (selection of w, w0, out) writes that part of w - w0.
    """
    worker, model, messages = client.worker, client.worker.model, client.worker.messages
    upload, (trained, sent, more) = messages.upload(client.round), given
    states = {"receive": client.new, "train": trained, "upload": more}
    check_hook_returns(worker.method, upload.packing, messages.client_state, states, sent, client.where, client.w)
    if "dw" in upload.packing.shapes and "dw" not in sent:
        subtract(upload.w, client.w0, upload.packing.view(row, "dw"))
    values = {name: sent[name] for name in sent if name in upload.packing.shapes}
    if upload.b.size:
        values["_b"] = upload.b.take(model.b)
    if values:
        upload.packing.write(row, values)
    new = [state for state in (client.new, trained, more) if state is not client.state]
    state = {name: value for each in new for name, value in each.items()}
    if not len(client.state_row):
        return state
    own = {"_w": messages.personal.take(model.w), "_b": messages.personal_b.take(model.b)}
    own |= client.optim.state() if client.optim else {}
    return {**own, **state}
