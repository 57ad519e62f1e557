"""A client's round on its rank: load the received model, train, and write the upload and the new client state."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning
from fedmpi.common.user_code_errors import add_error_context, format_error_line
from fedmpi.engine.hook_checks import (
    DIVERGENCE_HINT,
    ReadOnlyCheck,
    are_finite,
    check_finite,
    check_hook_returns,
    check_pair,
    hook_error,
)
from fedmpi.engine.local.training_loop import mean_loss
from fedmpi.engine.messages import CLIP, FAILED, STOP, UNCLIPPED, UploadLayout
from fedmpi.privacy.client_level import clip_vector

ClientContext = Any  # the class in client_context.py, which imports this module
LEFT_OUT_NOTE = "the client is left out of the round (faults.on_client_error: drop)"
RoundResult = tuple[dict[str, Tensor], Tensor | float | None]  # new client state; mean loss, or None without steps


def run_round(client: ClientContext, row: Tensor) -> bool:
    """Train a client for one round; write its upload into `row` and its new state into client.state_row.

    Args:
        row: the buffer for the upload, in the layout `messages.upload_layout(round)`. If the client fails and
            faults.on_client_error is `drop`, the row's flag is set to FAILED.

    Returns:
        Whether the client finished without an error.
    """
    succeeded = finish_round(client, row, partial(_train, client), time.perf_counter())
    client.trainer.unsent_tensor_guard.check(client.where)  # all clients share these tensors, so a change ends the run
    return succeeded


def _train(client: ClientContext, buffer: Tensor) -> RoundResult:
    """Train a client, write its upload to `buffer`, and return its new state and mean loss."""
    trainer, model, method = client.trainer, client.trainer.model, client.trainer.method
    model.load(client.received, client.b0)
    model.module.train()
    inputs = client.read_only_check()
    if trainer.may_draw_random_numbers:
        seeds.seed_global_generators(trainer.seed, "torch", client.round, client.id)
    with add_error_context(client.where):
        client.load_start_state()
        inputs.raise_if_written(method, client.where, "initial_weights")
        new = method.train(client)
        inputs.raise_if_written(method, client.where, "train", "loss", "regularizer", "correct_gradient", "step")
    return write_upload(client, buffer, inputs, new), mean_loss(client.losses)


def finish_round(client: ClientContext, row: Tensor, write: Callable[[Tensor], RoundResult], start_time: float) -> bool:
    """Write a client's upload into `row` and store its state; if `write` fails, mark the row as failed.

    Args:
        row: the buffer for the upload.
        write: a function that writes the upload into a buffer on the client's device, and returns the new state and the
            mean loss over the steps.
        start_time: the value of time.perf_counter() at the start of the client's round.

    Returns:
        Whether the client finished without an error. If it did not, the state that it had before this round is restored
        at the start of the next round.
    """
    trainer, buffer = client.trainer, row if row.device == client.w.device else client.w.new_empty(len(row))
    try:
        state, loss = write(buffer)
    except Exception as error:
        if not trainer.drops_failed_clients:
            raise
        warnings.warn(RankWarning(f"{format_error_line(error, client.where)}; {LEFT_OUT_NOTE}"), stacklevel=3)
        flag = STOP if trainer.stop() else FAILED
        trainer.messages.upload_layout(client.round).write_header(
            row.zero_(), 0.0, time.perf_counter() - start_time, flag
        )
        return False
    store_result(client, buffer, row, state, loss, start_time)
    return True


def store_result(
    client: ClientContext,
    buffer: Tensor,
    row: Tensor,
    state: Mapping[str, Tensor],
    loss: Tensor | float | None,
    start_time: float,
) -> None:
    """Store the result of a client's round: its new state, and its upload with loss, seconds and flag.

    On a GPU, the function ends by waiting for the GPU, so that the client's duration is known and the upload has been
    copied.

    Args:
        buffer: the upload without loss, seconds and flag, on the client's device. It is rounded to the formats of
            comm.compression and copied to `row`.
        row: the buffer for the upload, on the device that messages use.
        state: the new values of the slots of the client's state row.
        loss: the mean loss over the steps; None if the client took no steps.
        start_time: the value of time.perf_counter() at the start of the client's round.

    Raises:
        UserError: the new state or a slot of the upload contains nan or inf.
    """
    trainer, messages = client.trainer, client.trainer.messages
    upload = messages.upload_layout(client.round)
    if trainer.bounds_uploads:
        bound_upload(client, buffer, upload)
        loss = None  # a client's loss is not covered by the bound, and therefore not sent
    if len(client.state_row):
        messages.client_state.write(client.state_row, state)
    if isinstance(loss, Tensor):
        upload.packing.write(buffer, {"_loss": loss})
    # Declared slots are checked here, because hooks of the server use them without checking their values. The server
    # checks dw by its norm. A client state with nan or inf would be used for the rest of the run.
    spans = {} if trainer.drops_bad_updates else {n: span for n, span in upload.packing.spans.items() if n[0] != "_"}
    rows = {f"slot {n!r}": buffer[a:b] for n, (a, b) in spans.items() if n != "dw" and a < b}
    sums = [x.sum() for x in rows.values()]
    if upload.codec:
        upload.codec.round_trip(buffer)
    if len(client.state_row):
        rows["the client's state"] = client.state_row
        sums.append(client.state_row.sum())
    if buffer is not row:
        row.copy_(buffer, non_blocking=True)
    if not rows:
        trainer.synchronize()
    bad = [name for name, finite in zip(rows, are_finite([*rows.values()], sums), strict=True) if not finite]
    if bad and not trainer.drops_bad_updates:
        if bad[0] == "the client's state":
            check_finite(trainer.method, "train, upload", messages.client_state, client.state_row, client.where)
        text = f"returned values that are not finite (nan or inf) in {bad[0]}; {DIVERGENCE_HINT}"
        raise hook_error(trainer.method, "upload", client.where, text)
    loss = torch.nan if bad else loss  # the server will reject the upload and restore the client's state
    upload.write_header(row, loss, time.perf_counter() - start_time, STOP if trainer.stop() else 0.0)


def bound_upload(client: ClientContext, row: Tensor, upload: UploadLayout) -> None:
    """Clip everything that a client uploads as one vector, in place.

    Float buffers are replaced by their change, because the noise is proportional to the bound on what a client sends.

    Args:
        row: the upload of the client, without the engine's own fields.
    """
    if upload.b.size:
        upload.packing.view(row, "_b").sub_(upload.b.take(client.b0))
    within = clip_vector(row[upload.payload_start :], getattr(client.downloads, CLIP))
    if UNCLIPPED in upload.packing.spans:
        upload.packing.write(row, {UNCLIPPED: within})


def write_upload(client: ClientContext, row: Tensor, inputs: ReadOnlyCheck, trained: Any) -> dict[str, Tensor]:
    """Call the hook `upload`, check what the hooks returned, write the upload, and return the new client state.

    Args:
        client: the client, after its training.
        row: the buffer for the upload.
        inputs: the result of `client.read_only_check`, which detects whether hooks have written to their inputs.
        trained: the result of the hook `train`.
    """
    method, model, messages = client.trainer.method, client.trainer.model, client.trainer.messages
    with add_error_context(client.where):
        sent, more = check_pair(method, "upload", method.upload(client), client.where)
    inputs.raise_if_written(method, client.where, "upload")
    upload = messages.upload_layout(client.round)
    check_hook_returns(client, {"train": trained, "upload": more}, sent)
    if "dw" in upload.packing.shapes and "dw" not in sent:
        torch.sub(upload.w.take(model.w), upload.w.take(client.w0), out=upload.packing.view(row, "dw"))
    values = {name: sent[name] for name in sent if name in upload.packing.shapes}
    if upload.b.size:
        values["_b"] = upload.b.take(model.b)
    if values:
        upload.packing.write(row, values)
    new = [state for state in (trained, more) if state is not client.state]
    state = {name: value for each in new for name, value in each.items()}
    if not len(client.state_row):
        return state
    own = {"_w": messages.personal.take(model.w), "_b": messages.personal_b.take(model.b)}
    own |= client.optimizer_state.to_slots() if client.optimizer_state else {}
    return {**own, **state}
