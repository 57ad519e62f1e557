"""The probes of a run (`analysis`), which train the local models of a round separately and measure them afterwards.

In a measured round, clients are trained twice with the same random numbers and bitwise equal results. The round
itself and its recorded traffic do not change. Results do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.diagnostics import features, orthogonality, round_metrics
from fedmpi.engine.diagnostics.cohort import Cohort, Model
from fedmpi.engine.federation_config import FederationConfig, RunCallbacks
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.scheduler import ClientScheduler
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.round_transport import RoundTransport

PROBES = {
    **round_metrics.PROBES,
    "features": features.FEATURES_PROBE,
    "orthogonality": orthogonality.ORTHOGONALITY_PROBE,
}
NEED_UPDATES = {"drift", "layers"}  # probes that need w_k - w0


class Probes:
    """The probes of a run on one rank; they measure the rounds in which the model is evaluated."""

    def __init__(
        self,
        config: FederationConfig,
        states: ClientStates,
        transport: RoundTransport,
        scheduler: ClientScheduler,
        server: FederationServer | None,
        callbacks: RunCallbacks,
    ) -> None:
        self.config, self.names, self.comm, self.trainer = config, config.probes, states.comm, states.trainer
        self.states, self.transport, self.scheduler = states, transport, scheduler
        self.server, self.callbacks = server, callbacks
        self._before: Model | None = None
        self._local_models: dict[int, Model] = {}
        self._local_updates: dict[int, Tensor] = {}
        self._step_rows: dict[int, Tensor] = {}

    def is_due(self, t: int) -> bool:
        """Return whether round t is measured; this applies to every evaluate.every-th round and to the last one."""
        config = self.config
        return (t + 1) % config.evaluate_every == 0 or t + 1 == config.rounds

    def train_local_models(
        self, t: int, members: Sequence[int], rank_of: Mapping[int, int], downloads: Mapping[int, Tensor]
    ) -> None:
        """Train and store the local models of this rank's clients before round t, if the probes measure it.

        Args:
            members: the clients of the cohort.
            rank_of: client -> the rank that trains it.
            downloads: client -> its per-client download, as a flat row.
        """
        if not self.is_due(t):
            return
        trainer = self.trainer
        model, lr = trainer.model, self.config.learning_rate(t)
        if self.server is not None:
            self._before = Model(self.server.w.clone(), self.server.b.clone())
        row = model.w.new_empty(trainer.messages.upload_layout(t).packing.size)
        for client in (k for k in members if rank_of[k] == self.comm.rank):
            stored = self.states.client_context(client, t, lr, self.transport.broadcast_copy, downloads[client])
            rows = stored.broadcast_row, stored.download_row, stored.state_row.clone()
            context = ClientContext(trainer, client, t, lr, *rows)
            recorder = context.on_step = (
                orthogonality.GradientCosineRecorder(context) if "orthogonality" in self.names else None
            )
            with seeds.preserve_rng_state():
                context.run_round(row)
            if recorder is not None:
                self._step_rows[client] = recorder.to_row()
            self._local_models[client] = Model(model.w.clone(), model.b.clone())
            if NEED_UPDATES & {*self.names}:
                # w0 may differ from the global model (hook `initial_weights`, comm.compression).
                self._local_updates[client] = model.w - context.w0

    def measure(self, t: int, members: Sequence[int], rank_of: Mapping[int, int]) -> None:
        """Measure round t after its end, and append a row to analysis.jsonl.

        The row is {"round": t, "clients": [...], NAME: {...}}, with one entry NAME for each probe of the run.
        """
        if not self.is_due(t):
            return
        with self.comm.exclude_from_counts():  # traffic of probes is not counted as traffic of the round
            after = None if self.server is None else Model(self.server.w, self.server.b)
            before, after = self._broadcast_model(self._before), self._broadcast_model(after)
            p = self.scheduler.cohort_weights(members)[1].double().cpu()
            context = (self.comm, self.trainer, self.config.eval_batch, members, rank_of)
            cohort = Cohort(t, *context, p, before, after, self._local_models, self._local_updates, self._step_rows)
            results = {name: PROBES[name].measure(cohort) for name in self.names}
        self._before, self._local_models, self._local_updates, self._step_rows = None, {}, {}, {}
        if self.server is not None:
            self.callbacks.append_rows("analysis.jsonl", {"round": t, "clients": list(members), **results})

    def _broadcast_model(self, model: Model | None) -> Model:
        """Broadcast rank 0's model to all ranks and return it; `model` is None on all other ranks."""
        comm, own = self.comm, self.trainer.model
        sizes = [own.w.numel(), own.b.numel()]
        if model is None:
            both = torch.empty(sum(sizes), dtype=own.w.dtype, device=comm.device)
        else:
            both = torch.cat([model.w, model.b]).to(comm.device)
        comm.broadcast(both)
        return Model(*both.to(own.w.device).split(sizes))
