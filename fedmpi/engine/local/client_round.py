"""One client's round on its rank: load it, train it, write what it uploads and what it keeps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning
from fedmpi.common.user_code_errors import attribute_errors, one_line
from fedmpi.engine.checks import are_finite, check_finite, check_hook_returns, check_pair, wrong
from fedmpi.engine.local.training_loop import mean_loss
from fedmpi.engine.messages import FAILED, STOP
from fedmpi.flat.layout import Selection

ClientContext = Any  # that of context.py, which imports this
LEFT_OUT = "left out of the round (faults.on_client_error: drop)"


def run_round(client: ClientContext, row: Tensor) -> bool:
    """Train a client for a round: write its upload into `row`, and its new state into its state row.

    Args:
        row: one row of `messages.upload(round)`; a flag in it marks a client with an error, where such are left out.

    Returns:
        Whether the client came to no error.
    """
    began, trainer, model = time.perf_counter(), client.trainer, client.trainer.model
    method, here = trainer.method, row if row.device == client.w.device else client.w.new_empty(len(row))
    try:
        model.load(client.received, client.b0)
        model.module.train()
        inputs = client.read_only_check()
        if trainer.draws:
            seeds.reseed(trainer.seed, "torch", client.round, client.id)
        with attribute_errors(client.where):
            client.start()
            inputs.check_hooks(method, client.where, "receive")
            new = method.train(client)
            inputs.check_hooks(method, client.where, "train", "loss", "regularizer", "gradient", "step")
            sent, more = check_pair(method, "upload", method.upload(client), client.where)
            inputs.check_hooks(method, client.where, "upload")
        state = write_upload(
            client, here, (new, sent, more), lambda part, w0, out: torch.sub(part.take(model.w), part.take(w0), out=out)
        )
    except Exception as error:
        if not trainer.drops_failed_clients:
            raise
        leave_out(client, row, error, began)
        fine = False
    else:
        store_result(client, here, row, state, mean_loss(client.losses), began)
        fine = True
    trainer.frozen_guard.check(client.where)  # no error that leaves a client out: these tensors are those of all
    return fine


def leave_out(client: ClientContext, row: Tensor, error: Exception, began: float) -> None:
    """Mark the row of a client that came to an error; its state row is undone by the server's command.

    began: `time.perf_counter` when its round began.
    """
    trainer = client.trainer
    warnings.warn(RankWarning(f"{one_line(error, client.where)}; {LEFT_OUT}"), stacklevel=3)
    flag = STOP if trainer.stop() else FAILED
    trainer.messages.upload(client.round).write_header(row.zero_(), 0.0, time.perf_counter() - began, flag)


def store_result(
    client: ClientContext,
    here: Tensor,
    row: Tensor,
    state: Mapping[str, Tensor],
    loss: Tensor | float | None,
    began: float,
) -> None:
    """Store what a client's round leaves: its upload in `row`, with the engine's own numbers, and its new state.

    All questions to a GPU are one, which it answers when it has done the client's work: only then it is known how long
    that has taken, and the copy, which was asked for before, is complete.

    Args:
        here: the upload, but for the engine's own numbers; it is given the formats of comm.wire, and copied to `row`.
        loss: mean over the steps, None without any.
        began: `time.perf_counter` when the client's round began.

    Raises:
        UserError: a slot of the upload is not finite.
    """
    trainer, messages = client.trainer, client.trainer.messages
    upload = messages.upload(client.round)
    packing = upload.packing
    if len(client.state_row):
        messages.client_state.write(client.state_row, state)
    if isinstance(loss, Tensor):
        packing.write(here, {"_loss": loss})
    # The slots that the method declares: a server hook may not look at them, and go on with what is not finite. Of dw
    # the server sees the norm.
    names = (
        []
        if trainer.drops_bad_updates
        else [n for n, (a, b) in packing.spans.items() if n != "dw" and n[0] != "_" and a < b]
    )
    slots = {name: packing.view(here, name).flatten() for name in names}
    sums = [x.sum() for x in slots.values()]
    halves = messages.apply_quantization(upload, here, client.state_row) if upload.coding else {}
    if here is not row:
        row.copy_(here, non_blocking=True)
    rows = [*halves.values(), *([client.state_row] if len(client.state_row) else ())]
    finite = iter(are_finite([*slots.values(), *rows], [*sums, *(x.sum() for x in rows)]))
    if not slots and not rows:
        trainer.wait()
    for name in slots:
        if not next(finite):
            text = f"gave values that are not finite (nan or inf) in slot {name!r}; the usual cause is divergence"
            raise wrong(trainer.method, "upload", client.where, f"{text}: lower train.lr")
    for name in halves:
        if not next(finite):
            beyond = f"{client.where}: slot {name!r} is beyond fp16, which ends at 65,504, or not finite itself"
            warnings.warn(RankWarning(f"{beyond}; comm.wire.up: bf16 has the range of fp32"), stacklevel=2)
    if not next(finite, True):
        if not trainer.drops_bad_updates:
            check_finite(trainer.method, "train, upload", messages.client_state, client.state_row, client.where)
        loss = torch.nan  # the server refuses the upload, which undoes the round
    upload.write_header(row, loss, time.perf_counter() - began, STOP if trainer.stop() else 0.0)


def write_upload(
    client: ClientContext,
    row: Tensor,
    given: tuple[Any, Any, Any],
    subtract: Callable[[Selection, Tensor, Tensor], object],
) -> dict[str, Tensor]:
    """Check what `train` and `upload` gave, write the upload; returns what becomes of the client's state.

    subtract: (selection of w, w0, out) writes that part of w - w0.
    """
    model, messages = client.trainer.model, client.trainer.messages
    upload, (trained, sent, more) = messages.upload(client.round), given
    states = {"receive": client.new, "train": trained, "upload": more}
    check_hook_returns(client, states, sent)
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
