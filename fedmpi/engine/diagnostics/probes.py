"""The probes of a run, which train the local models of a round separately and measure them after the round.

In a measured round clients are trained twice with the same random numbers, so that both results are equal to the bit.
The round itself and its recorded traffic do not change. Results do not depend on the number of ranks.
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

PROBES = {**round_metrics.PROBES, "features": features.FEATURES, "orthogonality": orthogonality.ORTHOGONALITY}
MOVED = {"drift", "layers"}  # need w_k - w0


class Probes:
    """The probes of a run on one rank; they measure the rounds in which models are evaluated."""

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
        self._mine: dict[int, Model] = {}
        self._moved: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}

    def due(self, t: int) -> bool:
        """Return whether round t is measured: every evaluate.every rounds, and the last one."""
        config = self.config
        return (t + 1) % config.evaluate_every == 0 or t + 1 == config.rounds

    def train(self, t: int, members: Sequence[int], where: Mapping[int, int], downloads: Mapping[int, Tensor]) -> None:
        """Train and store the local models of this rank's clients, before round t itself.

        Args:
            members: the clients of the cohort.
            where: client -> the rank that trains it.
            downloads: client -> the flat row of its per-client download.
        """
        if not self.due(t):
            return
        trainer = self.trainer
        model, lr = trainer.model, self.config.learning_rate(t)
        if self.server is not None:
            self._before = Model(self.server.w.clone(), self.server.b.clone())
        row = model.w.new_empty(trainer.messages.upload_layout(t).packing.size)
        for client in (k for k in members if where[k] == self.comm.rank):
            seen = self.states.client_context(client, t, lr, self.transport.broadcast_copy, downloads[client])
            k = ClientContext(trainer, client, t, lr, seen.announcement, seen.download, seen.state_row.clone())
            steps = k.watch = orthogonality.Steps(k) if "orthogonality" in self.names else None
            with seeds.preserve_rng_state():
                k.run_round(row)
            if steps is not None:
                self._steps[client] = steps.row()
            self._mine[client] = Model(model.w.clone(), model.b.clone())
            if MOVED & {*self.names}:
                # k.w0 may differ from the global model: `initial_weights`, comm.compression
                self._moved[client] = model.w - k.w0

    def measure(self, t: int, members: Sequence[int], where: Mapping[int, int]) -> None:
        """Measure round t after its end; append {"round": t, "clients": [...], name: {...}} to analysis.jsonl."""
        if not self.due(t):
            return
        with self.comm.uncounted():  # traffic of probes is not counted as traffic of the round
            after = None if self.server is None else Model(self.server.w, self.server.b)
            before, after = self._shared(self._before), self._shared(after)
            p = self.scheduler.cohort_weights(members)[1].double().cpu()
            who = (self.comm, self.trainer, self.config.eval_batch, members, where)
            cohort = Cohort(t, *who, p, before, after, self._mine, self._moved, self._steps)
            results = {name: PROBES[name].measure(cohort) for name in self.names}
        self._before, self._mine, self._moved, self._steps = None, {}, {}, {}
        if self.server is not None:
            self.callbacks.append_rows("analysis.jsonl", {"round": t, "clients": list(members), **results})

    def _shared(self, model: Model | None) -> Model:
        """Broadcast rank 0's model to all ranks and return it; `model` is None on a rank without the server."""
        comm, own = self.comm, self.trainer.model
        sizes = [own.w.numel(), own.b.numel()]
        if model is None:
            both = torch.empty(sum(sizes), dtype=own.w.dtype, device=comm.device)
        else:
            both = torch.cat([model.w, model.b]).to(comm.device)
        comm.broadcast(both)
        return Model(*both.to(own.w.device).split(sizes))
