"""A round of several clients of one rank: trained together if possible, otherwise one after another."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.user_code_errors import add_error_context
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.hook_checks import ReadOnlyCheck
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.local.client_round import RoundResult, finish_round, write_upload
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.messages import NO_STEPS, STOP
from fedmpi.engine.packed.chain import uses_low_rank
from fedmpi.engine.packed.packed_fit import PackedFit, count_batches
from fedmpi.engine.packed.vmap_steps import VmapSteps
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import State

# Limits for compute.clients_per_pass: auto. The numbers (weights or factors) of all clients that are trained at once
# must fit into the processor's cache: at most MAX_CHAIN_NUMBERS in chain.py, MAX_VMAP_NUMBERS under vmap. With fewer
# than MIN_CLIENTS the gain is smaller than the overhead of vmap.
MAX_CHAIN_NUMBERS, MAX_VMAP_NUMBERS, MIN_CLIENTS, MAX_CLIENTS = 1 << 22, 1 << 19, 16, 64
RngState = seeds.RngState | None
REMEDY = "set compute.clients_per_pass: 1 (one client at a time), or auto (several at a time where possible)"


def unsupported_reason(
    method: Method,
    model: FlatModel,
    config: LocalTrainingConfig,
    *,
    bf16: bool,
    compiled: bool,
    checkpoints_activations: bool,
) -> str | None:
    """Return why clients cannot be trained together; None if no reason is known before training."""
    name = type(method).__name__
    dropout = [part.p for part in model.module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    reasons = {
        f"method {name} overrides the hook train": overrides(method, "train"),
        f"method {name} overrides the hook step": overrides(method, "step"),
        f"method {name} uses several batches per step": method.batches_per_step != 1,
        f"train.accumulate is {config.accumulate}": config.accumulate != 1,
        "the model has buffers (batch statistics)": bool(len(model.b) or model.batch_counters),
        "the model draws random numbers (dropout)": any(dropout),
        config.not_plain_sgd_reason(): bool(config.not_plain_sgd_reason()),
        "train.nesterov is true": config.nesterov,
        f"train.steps is set ({config.steps}) instead of train.epochs": config.steps
        is not None,  # may end within a pass
        "compute.precision is bf16": bf16,
        "compute.compile is true": compiled,
        "compute.gradient_checkpointing is true": checkpoints_activations,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def choose_clients_per_pass(clients_per_pass: int | str, model: FlatModel, samples: int = 0) -> int:
    """Return how many clients are trained together in one pass (compute.clients_per_pass).

    Args:
        samples: the number of samples that a client sees in a round if chain.py trains the clients (a chain of layers
            with plain SGD); otherwise 0.
    """
    if isinstance(clients_per_pass, int):
        return clients_per_pass
    if model.w.is_cuda:
        return 1  # on a GPU, CUDA graphs save more time
    numbers = 0
    for s in model.layout.segments:
        numbers += samples * sum(s.shape) if samples and uses_low_rank(s.shape, samples) else s.stop - s.start
    clients = min((MAX_CHAIN_NUMBERS if samples else MAX_VMAP_NUMBERS) // max(numbers, 1), MAX_CLIENTS)
    return clients if clients >= MIN_CLIENTS else 1


def train_clients(
    clients: Sequence[ClientContext], block: Callable[[Sequence[int]], Tensor | None]
) -> dict[int, Callable[[Tensor], object]]:
    """Train the clients together, if possible, and return functions that write their uploads.

    Args:
        block: a function that takes client ids and returns the upload rows of these clients as one tensor, or None if
            the rows are not adjacent in memory.

    Returns:
        Client id -> a function that writes this client's upload into a row; the functions must be called one after
        another. If clients are trained one by one, each function also trains its client.
    """
    if len(clients) < 2 or clients[0].trainer.clients_per_pass == 1:
        return {client.id: client.run_round for client in clients}
    trainer, start_time = clients[0].trainer, time.perf_counter()
    ordered = sorted(clients, key=lambda k: count_batches(trainer, k), reverse=True)
    try:
        trainer.model.module.train()
        started = [_start_client(client) for client in ordered]
        fit = PackedFit(trainer, ordered)
        if trainer.may_draw_random_numbers:
            # Seeds numpy and random as well; torch raises an error if random numbers are drawn under vmap.
            seeds.seed_global_generators(trainer.seed, "torch", ordered[0].round, ordered[0].id)
        fit()
        trainer.synchronize()
    except Exception as error:
        # Nothing has been written yet. If a client caused the error, training one by one raises it again; otherwise
        # training together caused it.
        return _make_single_client_trainers(clients, error)
    trainer.unsent_tensor_guard.check(f"round {ordered[0].round}")
    sizes = {client.id: max(len(trainer.data.train[client.id]), 1) for client in clients}
    seconds_per_sample = (time.perf_counter() - start_time) / sum(sizes.values())
    seconds = {client: seconds_per_sample * size for client, size in sizes.items()}
    rows = block([client.id for client in clients]) if _uploads_are_differences(fit) else None
    if rows is not None:
        buffer = rows if rows.device == trainer.model.w.device else trainer.model.w.new_empty(rows.shape)
        _write_uploads(clients, fit, buffer, list(seconds.values()))
        if buffer is not rows:
            rows.copy_(buffer)
        return dict.fromkeys((client.id for client in clients), lambda row: None)  # the uploads have been written above
    weights = fit.weights()
    return {
        k.id: partial(_finish_client, k, fit, i, weights[i], seconds[k.id], *started[i]) for i, k in enumerate(ordered)
    }


def _make_single_client_trainers(
    clients: Sequence[ClientContext], error: Exception
) -> dict[int, Callable[[Tensor], object]]:
    """Return functions that train one client each; used if training the clients together has failed with `error`.

    If all of them succeed, the clients are no longer trained together in later rounds.
    """
    succeeded: list[bool] = []

    def write(k: ClientContext, row: Tensor) -> None:
        new = ClientContext(k.trainer, k.id, k.round, k.lr, k.broadcast_row, k.download_row, k.state_row)
        succeeded.append(new.run_round(row))
        if len(succeeded) == len(clients) and all(succeeded):
            _stop_packing(k.trainer, error)

    return {client.id: partial(write, client) for client in clients}


def _uploads_are_differences(fit: PackedFit) -> bool:
    """Return whether uploads are w - w0 as it is, w0 is the same for all clients, and clients keep no state."""
    trainer, first = fit.trainer, fit.clients[0]
    upload, method = trainer.messages.upload_layout(first.round), trainer.method
    only_dw = [name for name in upload.packing.shapes if name[:1] != "_"] == ["dw"] and upload.codec is None
    stateless = not len(first.state_row) and not any(overrides(method, hook) for hook in ("initial_weights", "upload"))
    only_dw = only_dw and not trainer.bounds_uploads  # otherwise each upload is clipped
    return only_dw and upload.w.selects_all and stateless and all(k.w0 is first.w0 for k in fit.clients)


def _write_uploads(clients: Sequence[ClientContext], fit: PackedFit, rows: Tensor, seconds: list[float]) -> None:
    """Write the uploads of all clients at once into rows (n, ...), with the same result as `write_upload`."""
    trainer, first = fit.trainer, fit.clients[0]
    upload, position = trainer.messages.upload_layout(first.round), {client.id: i for i, client in enumerate(clients)}
    positions = [position[client.id] for client in fit.clients]
    stop = trainer.stop()
    flags = [STOP if stop else 0.0 if client.steps else NO_STEPS for client in clients]
    fit.write_differences(first.w0, upload.packing.view(rows, "dw"), positions)
    upload.packing.view(rows, "_loss")[positions] = fit.loss.to(rows.dtype)
    upload.packing.view(rows, "_seconds").copy_(torch.tensor(seconds), non_blocking=True)
    upload.packing.view(rows, "_flag").copy_(torch.tensor(flags), non_blocking=True)


def _start_client(client: ClientContext) -> tuple[ReadOnlyCheck, RngState]:
    """Prepare a client for its training in this round: call the hook `initial_weights` if the method overrides it.

    Returns:
        The result of `client.read_only_check`, and the state that the random generators must have when the hook
        `upload` starts (None: no particular state).
    """
    trainer, inputs, drawn = client.trainer, client.read_only_check(), None
    if overrides(trainer.method, "initial_weights"):
        seeds.seed_global_generators(trainer.seed, "torch", client.round, client.id)
        with add_error_context(client.where):
            trainer.model.load(client.received, client.b0)
            client.load_start_state()
            drawn = seeds.get_rng_state() if overrides(trainer.method, "upload") else None
        inputs.raise_if_written(trainer.method, client.where, "initial_weights")
    return inputs, drawn


def _finish_client(
    client: ClientContext,
    fit: PackedFit,
    i: int,
    w: Tensor,
    seconds: float,
    inputs: ReadOnlyCheck,
    drawn: RngState,
    row: Tensor,
) -> None:
    """Write the upload of a client from its trained weights w (d,), and finish its round.

    `i` is the client's position in `fit`, `inputs` and `drawn` are the results of `_start_client`, and `seconds` is the
    time that the round has taken so far.
    """

    def write(buffer: Tensor) -> RoundResult:
        trainer = client.trainer
        if isinstance(fit.steps, VmapSteps) and trainer.messages.accumulators.size:
            client.accumulators = trainer.messages.accumulators.views(fit.steps.accumulators[i])
        trainer.model.load(w, client.b0)
        if overrides(trainer.method, "upload"):
            seeds.seed_global_generators(trainer.seed, "torch", client.round, client.id)
            if drawn is not None:
                seeds.set_rng_state(drawn)
        return write_upload(client, buffer, inputs, State()), fit.loss[i] if client.steps else None

    finish_round(client, row, write, time.perf_counter() - seconds)


def _stop_packing(trainer: ClientTrainer, error: Exception) -> None:
    """Warn that clients cannot be trained together, and train them one by one from now on.

    Raises:
        UserError: compute.clients_per_pass is a number, so clients must be trained together.
    """
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = f"clients of method {type(trainer.method).__name__} cannot be trained together ({reason})"
    if trainer.strict:
        raise UserError(f"compute.clients_per_pass: {trainer.clients_per_pass}: {text}; {REMEDY}")
    trainer.clients_per_pass = 1
    warnings.warn(
        RankWarning(f"compute.clients_per_pass: auto: {text}, so they are trained one at a time"), stacklevel=2
    )
