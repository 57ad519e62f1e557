"""The rounds of several clients of a rank, trained together, or one by one if that is not possible."""

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
from fedmpi.engine.local.client_round import Result, finish_round, write_upload
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.messages import NO_STEPS, STOP
from fedmpi.engine.packed.chain import has_factors
from fedmpi.engine.packed.packed_fit import PackedFit, cut
from fedmpi.engine.packed.vmap_steps import VmapSteps
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import State

# Limits for pack: auto. IN_CHAINS (chain.py) and UNDER_VMAP limit the numbers (weights or factors) of all clients that
# are trained at once, because more do not fit into the processor's cache. With fewer than FEWEST clients the gain is
# smaller than the overhead of vmap.
IN_CHAINS, UNDER_VMAP, FEWEST, MOST = 1 << 22, 1 << 19, 16, 64
Drawn = seeds.RngState | None
REMEDY = "set compute.clients_per_pass: 1 (one by one), or auto, which does so where it must"


def unsupported_reason(
    method: Method, model: FlatModel, config: LocalTrainingConfig, *, bf16: bool, compiled: bool
) -> str | None:
    """Return a reason, known before training, why clients cannot be trained together; None if there is none."""
    name = type(method).__name__
    dropout = [part.p for part in model.module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    reasons = {
        f"method {name} has phases of its own (hook train)": overrides(method, "train"),
        f"method {name} has steps of its own (hook step)": overrides(method, "step"),
        f"method {name} takes several batches for a step": method.batches_per_step != 1,
        "the model has buffers (batch statistics)": bool(len(model.b) or model.batch_counters),
        "the model draws random numbers (dropout)": any(dropout),
        config.not_plain_sgd_reason(): bool(config.not_plain_sgd_reason()),
        "train.nesterov is true": config.nesterov,
        f"train.steps is {config.steps}": config.steps is not None,  # a round may end within a pass over the data
        "compute.precision is bf16": bf16,
        "compute.compile is true": compiled,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def clients_at_once(pack: int | str, model: FlatModel, samples: int = 0) -> int:
    """Return how many clients are trained at once.

    Args:
        pack: the setting compute.clients_per_pass.
        samples: number of samples that a client sees in a round, if plain SGD trains a chain of layers (chain.py);
            otherwise 0.
    """
    if isinstance(pack, int):
        return pack
    if model.w.is_cuda:
        return 1  # on a GPU, CUDA graphs save more time
    numbers = 0
    for s in model.layout.segments:
        numbers += samples * sum(s.shape) if samples and has_factors(s.shape, samples) else s.stop - s.start
    clients = min((IN_CHAINS if samples else UNDER_VMAP) // max(numbers, 1), MOST)
    return clients if clients >= FEWEST else 1


def train_clients(
    clients: Sequence[ClientContext], block: Callable[[Sequence[int]], Tensor | None]
) -> dict[int, Callable[[Tensor], object]]:
    """Train the clients together, if possible, and return functions that write their uploads.

    Args:
        block: takes client ids; returns their upload rows as one tensor, or None if they are not adjacent in memory.

    Returns:
        Client id -> a function that writes this client's upload into a row; call one after another. If clients are
        trained one by one, the call also trains the client.
    """
    if len(clients) < 2 or clients[0].trainer.pack == 1:
        return {client.id: client.run_round for client in clients}
    trainer, began = clients[0].trainer, time.perf_counter()
    ordered = sorted(clients, key=lambda k: cut(trainer, k), reverse=True)
    try:
        trainer.model.module.train()
        started = [_start(client) for client in ordered]
        fit = PackedFit(trainer, ordered)
        if trainer.draws:
            # Seeds numpy and random, too; torch raises an error if random numbers are drawn under vmap.
            seeds.seed_global_generators(trainer.seed, "torch", ordered[0].round, ordered[0].id)
        fit()
        trainer.wait()
    except Exception as error:
        # Nothing has been written yet. Training one by one raises a client's own error again; if there is none,
        # the error came from training together.
        return _one_by_one(clients, error)
    trainer.frozen_guard.check(f"round {ordered[0].round}")
    sizes = {client.id: max(len(trainer.data.train[client.id]), 1) for client in clients}
    sample = (time.perf_counter() - began) / sum(sizes.values())  # seconds per sample
    seconds = {client: sample * size for client, size in sizes.items()}
    rows = block([client.id for client in clients]) if _uploads_are_differences(fit) else None
    if rows is not None:
        here = rows if rows.device == trainer.model.w.device else trainer.model.w.new_empty(rows.shape)
        _write_all(clients, fit, here, list(seconds.values()))
        if here is not rows:
            rows.copy_(here)
        return dict.fromkeys((client.id for client in clients), lambda row: None)  # the uploads have been written above
    weights = fit.weights()
    return {k.id: partial(_finish, k, fit, i, weights[i], seconds[k.id], *started[i]) for i, k in enumerate(ordered)}


def _one_by_one(clients: Sequence[ClientContext], error: Exception) -> dict[int, Callable[[Tensor], object]]:
    """Return functions that train the clients one by one from the start, after training them together has failed."""
    fine: list[bool] = []

    def write(k: ClientContext, row: Tensor) -> None:
        new = ClientContext(k.trainer, k.id, k.round, k.lr, k.announcement, k.download, k.state_row)
        fine.append(new.run_round(row))
        if len(fine) == len(clients) and all(fine):
            _stop_packing(k.trainer, error)

    return {client.id: partial(write, client) for client in clients}


def _uploads_are_differences(fit: PackedFit) -> bool:
    """Return whether uploads consist of w - w0 only, w0 is the same for all clients, and clients keep no state."""
    trainer, first = fit.trainer, fit.clients[0]
    upload, method = trainer.messages.upload_layout(first.round), trainer.method
    alone = [name for name in upload.packing.shapes if name[:1] != "_"] == ["dw"] and upload.codec is None
    stateless = not len(first.state_row) and not any(overrides(method, hook) for hook in ("initial_weights", "upload"))
    return alone and upload.w.selects_all and stateless and all(k.w0 is first.w0 for k in fit.clients)


def _write_all(clients: Sequence[ClientContext], fit: PackedFit, rows: Tensor, seconds: list[float]) -> None:
    """Write the uploads of all clients at once into rows (n, ...), with the same result as `write_upload`."""
    trainer, first = fit.trainer, fit.clients[0]
    upload, place = trainer.messages.upload_layout(first.round), {client.id: i for i, client in enumerate(clients)}
    places = [place[client.id] for client in fit.clients]
    stop = trainer.stop()
    flags = [STOP if stop else 0.0 if client.steps else NO_STEPS for client in clients]
    fit.differences(first.w0, upload.packing.view(rows, "dw"), places)
    upload.packing.view(rows, "_loss")[places] = fit.loss.to(rows.dtype)
    upload.packing.view(rows, "_seconds").copy_(torch.tensor(seconds), non_blocking=True)
    upload.packing.view(rows, "_flag").copy_(torch.tensor(flags), non_blocking=True)


def _start(client: ClientContext) -> tuple[ReadOnlyCheck, Drawn]:
    """Start a client's round, up to its training.

    Returns:
        The check that hooks do not write to their inputs; the state of the random generators for `upload`, if needed.
    """
    trainer, inputs, drawn = client.trainer, client.read_only_check(), None
    if overrides(trainer.method, "initial_weights"):
        seeds.seed_global_generators(trainer.seed, "torch", client.round, client.id)
        with add_error_context(client.where):
            trainer.model.load(client.received, client.b0)
            client.start()
            drawn = seeds.get_rng_state() if overrides(trainer.method, "upload") else None
        inputs.check_hooks(trainer.method, client.where, "initial_weights")
    return inputs, drawn


def _finish(
    client: ClientContext,
    fit: PackedFit,
    i: int,
    w: Tensor,
    seconds: float,
    inputs: ReadOnlyCheck,
    drawn: Drawn,
    row: Tensor,
) -> None:
    """Finish the round of the client at position i of the fit, with trained weights w (d,), and write its upload."""

    def write(here: Tensor) -> Result:
        trainer = client.trainer
        if isinstance(fit.steps, VmapSteps) and trainer.messages.accumulators.size:
            client.accumulators = trainer.messages.accumulators.views(fit.steps.accumulators[i])
        trainer.model.load(w, client.b0)
        if overrides(trainer.method, "upload"):
            seeds.seed_global_generators(trainer.seed, "torch", client.round, client.id)
            if drawn is not None:
                seeds.set_rng_state(drawn)
        return write_upload(client, here, inputs, State()), fit.loss[i] if client.steps else None

    finish_round(client, row, write, time.perf_counter() - seconds)


def _stop_packing(trainer: ClientTrainer, error: Exception) -> None:
    """Warn that clients cannot be trained together, and train them one by one from now on.

    Raises:
        UserError: compute.clients_per_pass requires that they are trained together.
    """
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = f"clients of method {type(trainer.method).__name__} cannot be trained together: {reason}"
    if trainer.strict:
        raise UserError(f"compute.clients_per_pass: {trainer.pack}: {text}; {REMEDY}")
    trainer.pack = 1
    warnings.warn(RankWarning(f"compute.clients_per_pass: auto: {text}; they are trained one by one"), stacklevel=2)
