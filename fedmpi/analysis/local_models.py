"""Train the local models of a round for an analysis, without changing the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmpi.comm import detect
from fedmpi.comm.base import SingleProcess
from fedmpi.common import seeds
from fedmpi.config.schema import Settings
from fedmpi.data.federated import FederatedData
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.federation import Federation
from fedmpi.engine.local.client_context import ClientContext, StepCallback
from fedmpi.runtime import build, build_data
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.device import choose_device, configure_numerics


def load_all_data(settings: Settings) -> tuple[FederatedData, torch.device]:
    """Load the data of all clients into this process, and return them with the device for training."""
    configure_numerics(settings)
    device = choose_device(settings, detect({}))
    data = (
        build_data.build_silo_data(settings, SingleProcess(device))
        if settings.data.silos
        else build_data.build_partitioned_data(settings)
    )
    return data, device


def build_one_process_experiment(settings: Settings) -> Experiment:
    """Build the experiment of a config with all clients in this process."""
    return build.make_experiment(settings, *load_all_data(settings))


def make_trainer_with_seed(experiment: Experiment, seed: int) -> ClientTrainer:
    """Return a client trainer for the same experiment with a different seed, so that batches, dropout etc. differ."""
    settings = experiment.settings.model_copy(update={"seed": seed})
    return build.make_trainer(replace(experiment, settings=settings), lambda: False)


@dataclass(frozen=True)
class LocalModels:
    """The local models of a cohort of m clients after their training."""

    clients: Sequence[int]
    p: Tensor  # (m,) float64, the clients' weights in the aggregate
    w: Tensor  # (m, d) parameters
    b: Tensor  # (m, b) float buffers


def train_local_models(
    fed: Federation,
    trainer: ClientTrainer,
    members: Sequence[int],
    t: int,
    make_step_callback: Callable[[ClientContext], StepCallback] | None = None,
) -> LocalModels:
    """Train clients locally as in round t, without changing the global model of `fed` or the state of the clients.

    The returned parameters include layout groups that the method does not send in round t.

    Args:
        fed: the federation; training starts from its global model.
        trainer: the trainer of the clients.
        members: the numbers of the clients.
        t: the round, which determines the learning rate and the random numbers.
        make_step_callback: called with each client before it trains. It returns a function that is called in each step,
            after the gradient has been computed, with the batch (x, y).
    """
    messages, server, model, states = trainer.messages, fed.server, trainer.model, fed.states
    assert server is not None  # one process
    announcement = messages.broadcast_layout().packing
    inbox = torch.zeros(announcement.size, dtype=model.w.dtype, device=model.w.device)
    server_state = {name: server.state[name] for name in trainer.method.receives}
    announcement.write(
        inbox, {**server_state, "_b": messages.shared_b.take(server.b), "_w": messages.shared.take(server.w)}
    )
    row = inbox.new_empty(messages.upload_layout(t).packing.size)
    lr = fed.config.learning_rate(min(t, max(fed.config.rounds - 1, 0)))
    w, b = [], []
    for client in members:
        download = inbox.new_zeros(messages.per_client_download.size)
        messages.per_client_download.write(download, server.download(t, client))
        state = states.rows.get(client, messages.initial_state("client_state", states.w0, states.b0)).clone()
        with seeds.preserve_rng_state():
            k = ClientContext(trainer, client, t, lr, inbox, download, state)
            k.on_step, k.stops_on_request = make_step_callback and make_step_callback(k), False
            k.run_round(row)
        w.append(model.w.clone())
        b.append(model.b.clone())
    return LocalModels(tuple(members), fed.scheduler.cohort_weights(members)[1], torch.stack(w), torch.stack(b))
