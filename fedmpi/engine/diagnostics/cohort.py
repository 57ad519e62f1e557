"""The data that probes measure: the clients of a round and the models from their local training."""

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
    """Parameters w (d,) and float buffers b (b,) of a model, separate from the trainer's memory."""

    w: Tensor
    b: Tensor


@dataclass(frozen=True)
class Cohort:
    """The m clients of a round, as one rank sees them; `mine`, `moved` and `steps` contain this rank's clients only.

    A rank without clients loads no model: the model of a rank 0 without clients is the server's.
    """

    t: int  # the round
    comm: Communicator
    trainer: ClientTrainer
    batch: int  # samples of one pass of evaluation
    members: Sequence[int]
    where: Mapping[int, int]  # client -> the rank that trained it; in silo mode only this rank has its data
    p: Tensor  # (m,) float64, weights of the clients in the aggregate
    before: Model  # the global model before the round
    after: Model  # the global model after the round
    mine: Mapping[int, Model]  # local models of this rank's clients
    moved: Mapping[int, Tensor]  # their updates w_k - w0 (d,)
    steps: Mapping[int, Tensor]  # their rows of orthogonality.Steps, if that probe is on

    def models(self) -> Iterator[tuple[int, Model]]:
        """Yield (client, its local model) for all clients of the round in order; must be called on all ranks."""
        sizes = [self.before.w.numel(), self.before.b.numel()]
        for client, both in self._shared("local model", lambda k: torch.cat(self.mine[k]), sum(sizes)):
            yield client, Model(*both.split(sizes))

    def updates(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (client, its update w_k - w0) for all clients of the round in order; must be called on all ranks."""
        return self._shared("dw", lambda k: self.moved[k], self.before.w.numel())

    def _shared(self, what: str, own: Callable[[int], Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
        """Send each client's vector (size,) from its rank to all others; yield (client, vector) for all clients.

        Args:
            what: a description of the vectors for the audit of messages.
            own: returns the vector of a client of this rank.
        """
        comm = self.comm
        for client in self.members:
            if self.where[client] == comm.rank:
                row = own(client).to(comm.device)
                comm.message_info = self.t, (what,)
                comm.exchange([(rank, row) for rank in comm.alive if rank != comm.rank], [])
            else:
                row = torch.empty(size, device=comm.device, dtype=self.before.w.dtype)
                comm.exchange([], [(self.where[client], row)])
            yield client, row.to(self.before.w.device)

    def gather(self, rows: Mapping[int, Tensor], width: int) -> Tensor:
        """Gather the rows (width,) of all clients in order, (m, width) float64 on rank 0; (0, width) on other ranks."""
        comm, rows = self.comm, {k: row.double().to(self.comm.device) for k, row in rows.items()}
        if comm.rank:
            comm.message_info = self.t, ("figures of analysis",)
            comm.exchange([(0, rows[k]) for k in self.members if k in rows], [])
            return torch.empty(0, width, dtype=torch.float64)
        sent = {k: torch.empty(width, dtype=torch.float64, device=comm.device) for k in self.members if self.where[k]}
        comm.exchange([], [(self.where[k], row) for k, row in sent.items()])
        return torch.stack([(sent | rows)[k] for k in self.members]).cpu()

    def evaluate(self, model: Model, shard: Shard) -> Evaluation:
        """Load a model and evaluate it on samples, in evaluation mode, without augmentation."""
        self.trainer.model.load(*model)
        return evaluate(self.trainer, shard, self.batch)


class Probe(NamedTuple):
    """One measurement: a function that computes a row of numbers for each client, and one that summarises all rows."""

    rows: Callable[[Cohort], tuple[int, Mapping[int, Tensor]]]  # on each rank: width; client -> row (width,)
    summary: Callable[[Cohort, Tensor], dict[str, Any]]  # on rank 0: rows (m, width) float64 -> results

    def measure(self, c: Cohort) -> dict[str, Any]:
        """Measure a round; must be called on all ranks. Return the results on rank 0, {} elsewhere."""
        width, rows = self.rows(c)
        table = c.gather(rows, width)
        return {} if c.comm.rank else self.summary(c, table)
