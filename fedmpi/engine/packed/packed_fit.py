"""The batch loop of n clients at once; each client makes its own steps, on its own batches, in its own order.

Batches of equal size form one batched pass. First come the full batches of an epoch, of all clients that have so many;
then the smaller remaining batches, size by size. A client's result depends on its own data, and not on the clients
trained with it, except for the last bits of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedmpi.data.batches import draw_augmentation_numbers, epoch_order, gather_samples
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.packed.chain import Members, PackedChain
from fedmpi.engine.packed.vmap_steps import VmapSteps
from fedmpi.method.base import overrides


def cut(trainer: ClientTrainer, k: ClientContext) -> tuple[int, int]:
    """Return the number of full batches in an epoch of a client, and of the samples in a last, smaller batch."""
    size = trainer.local_training.batch_size
    if size is None:
        return 0, k.n
    return k.n // size, 0 if trainer.local_training.drop_last else k.n % size


class PackedFit:
    """Trains n clients together when it is called; then `loss` (n,) is the mean loss over each client's steps."""

    def __init__(self, trainer: ClientTrainer, clients: Sequence[ClientContext]) -> None:
        """Args:
        clients: in descending order of their numbers of batches.
        """
        self.trainer, self.clients = trainer, clients
        self.epochs, self.cuts = trainer.local_training.epochs or 0, [cut(trainer, k) for k in clients]
        self.steps = self._chain() or VmapSteps(trainer, clients)
        self.sum = torch.zeros(len(clients), dtype=torch.float64, device=trainer.model.w.device)
        self.carry = [0.0] * len(clients)

    def _chain(self) -> PackedChain | None:
        """Return a PackedChain if plain SGD trains a whole chain of layers from one w0 for all clients, else None."""
        trainer, config, w0 = self.trainer, self.trainer.local_training, self.clients[0].w0
        chain, hooks = (
            trainer.mlp_backward,
            any(overrides(trainer.method, hook) for hook in ("regularizer", "correct_gradient")),
        )
        if chain is None or hooks or config.momentum or config.weight_decay or "*" not in trainer.method.trains:
            return None
        if any(k.w0 is not w0 for k in self.clients):
            return None
        samples = self.cuts[0][0] * (config.batch_size or 0) + sum({rest for _, rest in self.cuts})
        return PackedChain(chain.layers, trainer.model, w0, len(self.clients), self.epochs * samples)

    def __call__(self) -> None:
        contexts = self.clients
        generators = [self.trainer.generators(k.round, k.id, k.fits) for k in contexts]
        for epoch in range(self.epochs):
            views: list[Any] = [self.steps.view] if isinstance(self.steps, VmapSteps) else []
            for k in (*views, *contexts):
                k.epoch, k.last_epoch = epoch, epoch == self.epochs - 1
            for places, rows, u in self._batches(generators):
                if self.trainer.stop():
                    break
                self._step(places, rows, u)
        for k in contexts:
            k.fits += 1
        steps = torch.tensor([max(k.steps, 1) for k in contexts], dtype=torch.float64)
        self.loss = self.sum / steps.to(self.sum.device, non_blocking=True)

    def _batches(
        self, generators: Sequence[tuple[torch.Generator, torch.Generator | None]]
    ) -> Iterator[tuple[Sequence[int], Tensor, Tensor | None]]:
        """Yield the batches of one epoch.

        Yields:
            Positions of clients; the rows (clients, B) of their next batches; the random numbers that augmentation
            uses for these rows (clients, B, columns), or None.
        """
        size, shards = self.trainer.local_training.batch_size, [self.trainer.data.train[k.id] for k in self.clients]
        orders = [epoch_order(shard, size, g) for shard, (g, _) in zip(shards, generators, strict=True)]
        numbers = [draw_augmentation_numbers(shard, g) for shard, (_, g) in zip(shards, generators, strict=True)]
        padded = pad_sequence(orders, batch_first=True).to(shards[0].x.device, non_blocking=True)
        u = (
            pad_sequence([each for each in numbers if each is not None], batch_first=True)
            if shards[0].random_numbers_per_sample
            else None
        )
        for s in range(self.cuts[0][0]):
            assert size is not None
            many = sum(full > s for full, _ in self.cuts)
            columns = slice(s * size, (s + 1) * size)
            yield range(many), padded[:many, columns], None if u is None else u[:many, columns]
        for rest in sorted({rest for _, rest in self.cuts if rest}, reverse=True):
            places = [i for i, (_, each) in enumerate(self.cuts) if each == rest]
            first = [self.cuts[i][0] * (size or 0) for i in places]
            parts = [(i, slice(at, at + rest)) for i, at in zip(places, first, strict=True)]
            rows = torch.stack([padded[part] for part in parts])
            yield places, rows, None if u is None else torch.stack([u[part] for part in parts])

    def _read(self, places: Sequence[int], rows: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return samples x (clients, B, ...), augmented with random numbers u, and targets y (clients, B) of rows."""
        shards = [self.trainer.data.train[self.clients[i].id] for i in places]
        x, y = shards[0].x, shards[0].y
        if all(shard.x is x and shard.y is y for shard in shards):
            flat = rows.reshape(-1)
            x, y = gather_samples(x, flat, None if u is None else u.flatten(0, 1)), y.index_select(0, flat)
        else:
            alone = list(zip(shards, rows, [None] * len(rows) if u is None else u, strict=True))
            x = torch.cat([gather_samples(k.x, each, v) for k, each, v in alone])
            y = torch.cat([k.y.index_select(0, each) for k, each, _ in alone])
        return x.unflatten(0, rows.shape), y.unflatten(0, rows.shape)

    def differences(self, w0: Tensor, rows: Tensor, places: Sequence[int]) -> None:
        """Write w - w0 of the clients into rows (n, d); that of client i goes into row places[i]."""
        in_order = list(places) == list(range(len(rows)))
        out = rows if in_order else torch.empty_like(rows)
        self.steps.differences(w0, out)
        if not in_order:
            rows[places] = out

    def weights(self) -> Tensor:
        """Return the clients' weights (n, d)."""
        if isinstance(self.steps, VmapSteps):
            return self.steps.w
        w0, w = self.clients[0].w0, self.clients[0].w0.new_empty(len(self.clients), len(self.clients[0].w0))
        self.steps.differences(w0, w)
        return w.add_(w0)

    def _step(self, places: Sequence[int], rows: Tensor, u: Tensor | None) -> None:
        """Make one step of the clients in these positions on these rows of their data."""
        members: Members = slice(places[0], places[-1] + 1)
        if places[-1] - places[0] != len(places) - 1:
            members = torch.tensor(places).to(rows.device, non_blocking=True)
        if isinstance(self.steps, VmapSteps):
            self.steps.view.members = places
        losses = self.steps.step(members, *self._read(places, rows, u), self.clients[0].lr)
        self.sum[members] += losses.double()
        for i in places:
            k, self.carry[i] = self.clients[i], self.trainer.local_training.momentum * self.carry[i] + 1
            k.steps, k.gradient_weight = k.steps + 1, k.gradient_weight + self.carry[i]
