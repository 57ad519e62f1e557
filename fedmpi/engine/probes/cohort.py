"""What the probes look at: a round's clients, with the model that each had after its local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.data.batches import Shard
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.evaluate import evaluate
from fedmpi.tasks.measures import Figures


@dataclass(frozen=True)
class Model:
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
        """(client, its local model), of all members in order; on a rank without clients of its own too."""
        sizes = [self.before.w.numel(), self.before.b.numel()]
        for client, both in self._shared(
            "local model", lambda k: torch.cat([self.mine[k].w, self.mine[k].b]), sum(sizes)
        ):
            yield client, Model(*both.split(sizes))

    def updates(self) -> Iterator[tuple[int, Tensor]]:
        """(client, its w_k - w0), likewise."""
        return self._shared("dw", lambda k: self.moved[k], self.before.w.numel())

    def _shared(self, what: str, own: Callable[[int], Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
        """(client, what the rank that has it holds of it), of all members in order. what: in words, for the audit."""
        comm = self.comm
        for client in self.members:
            holder = self.where[client]
            if holder == comm.rank:
                row = own(client).to(comm.device)
                comm.about = self.t, (what,)
                comm.exchange([(rank, row) for rank in comm.alive if rank != comm.rank], [])
            else:
                row = torch.empty(size, device=comm.device, dtype=self.dtype)
                comm.exchange([], [(holder, row)])
            yield client, row.to(self.before.w.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.before.w.dtype

    def gather(self, values: Mapping[int, Tensor], width: int) -> Tensor:
        """(m, width) float64 at rank 0, a row a member in order, from the rank that has the client; else (0, width)."""
        comm, out = self.comm, []
        if comm.rank:
            rows = [values[k].double().to(comm.device) for k in self.members if self.where[k] == comm.rank]
            comm.about = self.t, ("figures of analysis",)
            comm.exchange([(0, row) for row in rows], [])
            return torch.empty(0, width, dtype=torch.float64)
        for client in self.members:
            row = torch.empty(width, dtype=torch.float64, device=comm.device)
            out.append(values[client].double().to(comm.device) if self.where[client] == 0 else row)
        comm.exchange([], [(self.where[k], row) for k, row in zip(self.members, out, strict=True) if self.where[k]])
        return torch.stack(out).cpu()

    def figures(self, model: Model, shard: Shard) -> Figures:
        """{loss, the task's metrics} of a model on samples, in evaluation mode, without augmentation."""
        self.trainer.model.load(model.w, model.b)
        return evaluate(self.trainer, shard, self.batch).figures

    def train_loss(self, model: Model, client: int) -> float:
        """L_k: mean loss of a model on the training samples of one of this rank's clients."""
        return self.figures(model, self.trainer.data.train[client])["loss"]
