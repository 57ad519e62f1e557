"""The probes of a run: local models are made once more, beside the round, and looked at when the round is over.

The clients' training of a measured round is done twice, by the same draws, so that it is the same to the bit; nothing
of the round itself is touched, not its bytes either. What is measured does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common import seeds
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.local.client import LocalClient
from fedmpi.engine.plan import Plan, Sink
from fedmpi.engine.probes import contribution, drift, features, knowledge, layers, losses, orthogonality, similarity
from fedmpi.engine.probes.cohort import Cohort, Model
from fedmpi.engine.sampling import Roster
from fedmpi.engine.server import FederationServer
from fedmpi.engine.travel.exchange import Exchange
from fedmpi.engine.worker import Worker


class Run(Protocol):
    """What the probes see of the federation."""

    plan: Plan
    comm: Communicator
    worker: Worker
    server: FederationServer | None
    states: ClientStates
    exchange: Exchange
    roster: Roster
    sink: Sink


Probe = Callable[[Cohort], dict[str, Any]]  # every rank calls it; what it returns is rank 0's
PROBES: dict[str, Probe] = {
    "losses": losses.measure,
    "drift": drift.measure,
    "knowledge": knowledge.measure,
    "contribution": contribution.measure,
    "features": features.measure,
    "similarity": similarity.measure,
    "orthogonality": orthogonality.measure,
    "layers": layers.measure,
}

MOVED = {"drift", "layers"}  # they look at w_k - w0


class Probes:
    """Those of one run on one rank, in rounds that are evaluated."""

    def __init__(self, fed: Run, names: Sequence[str]) -> None:
        self.fed, self.names = fed, names
        self._before: Model | None = None
        self._mine: dict[int, Model] = {}
        self._moved: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}

    def due(self, t: int) -> bool:
        """Whether round t is measured: every evaluate.every rounds, and the last one."""
        plan = self.fed.plan
        return bool(self.names) and ((t + 1) % plan.every == 0 or t + 1 == plan.rounds)

    def train(self, t: int, members: Sequence[int], where: Mapping[int, int], downloads: Mapping[int, Tensor]) -> None:
        """The local models of this rank's clients, before the round itself."""
        if not self.due(t):
            return
        fed, worker = self.fed, self.fed.worker
        model, lr = worker.model, fed.plan.learning_rate(t)
        if fed.server is not None:
            self._before = Model(fed.server.w.clone(), fed.server.b.clone())
        row = model.w.new_empty(worker.messages.upload(t).packing.size)
        for client in (k for k in members if where[k] == fed.comm.rank):
            seen = fed.states.view(client, t, lr, fed.exchange.inbox, downloads[client])
            k = LocalClient(worker, client, t, lr, seen.announcement, seen.download, seen.state_row.clone())
            steps = k.watch = orthogonality.Steps(k) if "orthogonality" in self.names else None
            with seeds.restored():
                k.take_part(row)
            if steps is not None:
                self._steps[client] = steps.row()
            self._mine[client] = Model(model.w.clone(), model.b.clone())
            if MOVED & {*self.names}:
                self._moved[client] = model.w - k.w0  # a method may begin elsewhere, formats round what was announced

    def measure(self, t: int, members: Sequence[int], where: Mapping[int, int]) -> None:
        """The round is over: what its probes say goes to the sink, as {"round": t, name: {...}}."""
        if not self.due(t):
            return
        fed = self.fed
        with self._not_counted():
            after = None if fed.server is None else Model(fed.server.w, fed.server.b)
            before, after = self._shared(self._before), self._shared(after)
            p = fed.roster.weights(members)[1].double().cpu()
            who = (fed.comm, fed.worker, fed.plan.eval_batch, members, where)
            cohort = Cohort(t, *who, p, before, after, self._mine, self._moved, self._steps)
            said = {name: PROBES[name](cohort) for name in self.names}
        self._before, self._mine, self._moved, self._steps = None, {}, {}, {}
        if fed.server is not None:
            fed.sink.analysis({"round": t, "clients": list(members), **said})

    def _shared(self, model: Model | None) -> Model:
        """Rank 0's, on every rank."""
        comm, own = self.fed.comm, self.fed.worker.model
        sizes = [own.w.numel(), own.b.numel()]
        if model is None:
            both = torch.empty(sum(sizes), dtype=own.w.dtype, device=comm.device)
        else:
            both = torch.cat([model.w, model.b]).to(comm.device)
        comm.broadcast(both)
        return Model(*both.to(own.w.device).split(sizes))

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """The bytes of a round are those that it needs."""
        comm = self.fed.comm
        counted = comm.sent_bytes, comm.received_bytes
        try:
            yield
        finally:
            comm.sent_bytes, comm.received_bytes = counted
