"""What probes look at: a round's clients, with the model that each had after its local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.data.batches import Shard
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.evaluate import Evaluation, evaluate


class Model(NamedTuple):
    """Parameters (d,) and buffers; another tensor than the trainer's."""

    w: Tensor
    b: Tensor


@dataclass(frozen=True)
class Cohort:
    """The m clients of a round. Every rank has one; `mine` differs, and who has none loads no model: that of a rank 0
    that is server alone is the server's."""

    t: int  # the round
    comm: Communicator
    trainer: ClientTrainer
    batch: int  # samples of one pass of evaluation
    members: Sequence[int]
    where: Mapping[int, int]  # client -> the rank that trained it, and alone has its data in silo mode
    p: Tensor  # (m,) float64, their weights in the aggregate
    before: Model  # the global model that they received
    after: Model  # the global model that the round made
    mine: Mapping[int, Model]  # of this rank's clients: what local training made
    moved: Mapping[int, Tensor]  # of the same, (d,) each: how far from where it began, w_k - w0
    steps: Mapping[int, Tensor]  # of the same: what orthogonality.Steps has seen of it, where that is asked for

    def models(self) -> Iterator[tuple[int, Model]]:
        """Yield (client, its local model) of all members in order; on a rank without clients of its own too."""
        sizes = [self.before.w.numel(), self.before.b.numel()]
        for client, both in self._shared("local model", lambda k: torch.cat(self.mine[k]), sum(sizes)):
            yield client, Model(*both.split(sizes))

    def updates(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (client, its w_k - w0), likewise."""
        return self._shared("dw", lambda k: self.moved[k], self.before.w.numel())

    def _shared(self, what: str, own: Callable[[int], Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (client, its vector from the rank that has it) of all members. what: in words, for the audit."""
        comm = self.comm
        for client in self.members:
            if self.where[client] == comm.rank:
                row = own(client).to(comm.device)
                comm.about = self.t, (what,)
                comm.exchange([(rank, row) for rank in comm.alive if rank != comm.rank], [])
            else:
                row = torch.empty(size, device=comm.device, dtype=self.before.w.dtype)
                comm.exchange([], [(self.where[client], row)])
            yield client, row.to(self.before.w.device)

    def gather(self, rows: Mapping[int, Tensor], width: int) -> Tensor:
        """Return all members' rows (m, width), float64, in order at rank 0; (0, width) elsewhere."""
        comm, rows = self.comm, {k: row.double().to(self.comm.device) for k, row in rows.items()}
        if comm.rank:
            comm.about = self.t, ("figures of analysis",)
            comm.exchange([(0, rows[k]) for k in self.members if k in rows], [])
            return torch.empty(0, width, dtype=torch.float64)
        sent = {k: torch.empty(width, dtype=torch.float64, device=comm.device) for k in self.members if self.where[k]}
        comm.exchange([], [(self.where[k], row) for k, row in sent.items()])
        return torch.stack([(sent | rows)[k] for k in self.members]).cpu()

    def evaluate(self, model: Model, shard: Shard) -> Evaluation:
        """Evaluate a model on samples, in evaluation mode, without augmentation."""
        self.trainer.model.load(*model)
        return evaluate(self.trainer, shard, self.batch)


class Probe(NamedTuple):
    """One measurement: a row of numbers of each client, from the rank that has it; what rank 0 makes of them all."""

    rows: Callable[[Cohort], tuple[int, Mapping[int, Tensor]]]  # their width, and this rank's clients' rows (width,)
    summary: Callable[[Cohort, Tensor], dict[str, Any]]  # (m, width) float64, in order of the members

    def measure(self, c: Cohort) -> dict[str, Any]:
        """Measure a round; called on every rank, the results are rank 0's."""
        width, rows = self.rows(c)
        table = c.gather(rows, width)
        return {} if c.comm.rank else self.summary(c, table)
