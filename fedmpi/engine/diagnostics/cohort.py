"""The input of probes: the clients of a round and their models after local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.data.batches import Shard
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.evaluate import Evaluation, evaluate_model


class Model(NamedTuple):
    """Parameters w (d,) and float buffers b (b,) of a model, as tensors that the trainer does not change."""

    w: Tensor
    b: Tensor


@dataclass(frozen=True)
class Cohort:
    """The m clients of a round, with the local models and updates that this rank has.

    `local_models`, `local_updates` and `step_rows` contain the clients of this rank only. Probes must not load a model
    on a rank without clients, because the trainer's model on rank 0 may be the global model.
    """

    t: int  # the round
    comm: Communicator
    trainer: ClientTrainer
    batch_size: int  # samples per forward pass of evaluation
    members: Sequence[int]  # the ids of the clients
    rank_of: Mapping[int, int]  # client -> the rank that trained it; in silo mode only this rank has its data
    p: Tensor  # (m,) float64, weights of the clients in the aggregate
    before: Model  # the global model before the round
    after: Model  # the global model after the round
    local_models: Mapping[int, Model]  # client -> its model after local training
    local_updates: Mapping[int, Tensor]  # client -> w_k - w0 (d,), if a probe needs them
    step_rows: Mapping[int, Tensor]  # client -> its row of GradientCosineRecorder, if that probe is configured

    def models(self) -> Iterator[tuple[int, Model]]:
        """Yield each client of the round with its local model, in order; must be called on all ranks."""
        sizes = [self.before.w.numel(), self.before.b.numel()]
        for client, both in self._exchange("local model", lambda k: torch.cat(self.local_models[k]), sum(sizes)):
            yield client, Model(*both.split(sizes))

    def updates(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each client of the round with its update w_k - w0, in order; must be called on all ranks."""
        return self._exchange("dw", lambda k: self.local_updates[k], self.before.w.numel())

    def _exchange(self, what: str, local_vector: Callable[[int], Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
        """Send each client's vector from its rank to all other ranks, and yield each client with its vector.

        Args:
            what: the name of the vectors in the audit log of messages.
            local_vector: a function that returns the vector (size,) of a client of this rank.
        """
        comm = self.comm
        for client in self.members:
            if self.rank_of[client] == comm.rank:
                row = local_vector(client).to(comm.device)
                comm.message_info = self.t, (what,)
                comm.exchange([(rank, row) for rank in comm.alive if rank != comm.rank], [])
            else:
                row = torch.empty(size, device=comm.device, dtype=self.before.w.dtype)
                comm.exchange([], [(self.rank_of[client], row)])
            yield client, row.to(self.before.w.device)

    def gather(self, rows: Mapping[int, Tensor], width: int) -> Tensor:
        """Gather the rows (width,) of all clients on rank 0.

        Returns:
            (m, width) float64 on rank 0, in the order of `members`; (0, width) on other ranks.
        """
        comm, rows = self.comm, {k: row.double().to(self.comm.device) for k, row in rows.items()}
        if comm.rank:
            comm.message_info = self.t, ("metrics of analysis",)
            comm.exchange([(0, rows[k]) for k in self.members if k in rows], [])
            return torch.empty(0, width, dtype=torch.float64)
        received = {
            k: torch.empty(width, dtype=torch.float64, device=comm.device) for k in self.members if self.rank_of[k]
        }
        comm.exchange([], [(self.rank_of[k], row) for k, row in received.items()])
        return torch.stack([(received | rows)[k] for k in self.members]).cpu()

    def evaluate_model(self, model: Model, shard: Shard) -> Evaluation:
        """Evaluate a model on samples, in evaluation mode and without augmentation."""
        self.trainer.model.load(*model)
        return evaluate_model(self.trainer, shard, self.batch_size)


class Probe(NamedTuple):
    """A measurement of a round: one function computes a row of numbers for each client, another summarises all rows."""

    compute_rows: Callable[[Cohort], tuple[int, Mapping[int, Tensor]]]  # on each rank: width; client -> row (width,)
    summarize: Callable[[Cohort, Tensor], dict[str, Any]]  # on rank 0: rows (m, width) float64 -> results

    def measure(self, cohort: Cohort) -> dict[str, Any]:
        """Measure a round; return the results on rank 0 and {} on other ranks. Must be called on all ranks."""
        width, rows = self.compute_rows(cohort)
        table = cohort.gather(rows, width)
        return {} if cohort.comm.rank else self.summarize(cohort, table)
