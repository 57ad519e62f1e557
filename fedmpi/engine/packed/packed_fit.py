"""The training loop for n clients at once: each client takes its own steps on its own batches, in its own order.

Batches of equal size form one batched pass. In an epoch, each pass takes one full batch of every client that has one
left; then come the smaller last batches, grouped by size. Which clients are trained together affects only the last bits
of their results, because the order in which kernels sum may depend on the number of clients.
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
from fedmpi.engine.packed.chain import ClientIndex, PackedChain
from fedmpi.engine.packed.vmap_steps import VmapSteps
from fedmpi.method.base import overrides


def count_batches(trainer: ClientTrainer, k: ClientContext) -> tuple[int, int]:
    """Return the number of full batches in an epoch of client k, and the size of the smaller last batch (or 0)."""
    size = trainer.local_training.batch_size
    if size is None:
        return 0, k.n
    return k.n // size, 0 if trainer.local_training.drop_last else k.n % size


class PackedFit:
    """Trains n clients together when it is called; `loss` (n,) then holds each client's mean loss over its steps."""

    def __init__(self, trainer: ClientTrainer, clients: Sequence[ClientContext]) -> None:
        """Prepare the training of `clients`, which must be in descending order of their numbers of batches."""
        self.trainer, self.clients = trainer, clients
        self.epochs = trainer.local_training.epochs or 0
        self.batch_counts = [count_batches(trainer, k) for k in clients]
        self.steps = self._chain() or VmapSteps(trainer, clients)
        self.loss_sums = torch.zeros(len(clients), dtype=torch.float64, device=trainer.model.w.device)
        self.momentum_sums = [0.0] * len(clients)

    def _chain(self) -> PackedChain | None:
        """Return a PackedChain if all clients train a chain of layers by plain SGD from the same w0; otherwise None."""
        trainer, config, w0 = self.trainer, self.trainer.local_training, self.clients[0].w0
        chain = trainer.mlp_backward
        hooks = any(overrides(trainer.method, hook) for hook in ("regularizer", "correct_gradient"))
        if chain is None or hooks or config.momentum or config.weight_decay or "*" not in trainer.method.trains:
            return None
        if any(k.w0 is not w0 for k in self.clients):
            return None
        samples = self.batch_counts[0][0] * (config.batch_size or 0) + sum({rest for _, rest in self.batch_counts})
        return PackedChain(chain.layers, trainer.model, w0, len(self.clients), self.epochs * samples)

    def __call__(self) -> None:
        contexts = self.clients
        generators = [self.trainer.make_generators(k.round, k.id, k.num_fits) for k in contexts]
        for epoch in range(self.epochs):
            views: list[Any] = [self.steps.view] if isinstance(self.steps, VmapSteps) else []
            for k in (*views, *contexts):
                k.epoch, k.last_epoch = epoch, epoch == self.epochs - 1
            for positions, rows, u in self._batches(generators):
                if self.trainer.stop():
                    break
                self._step(positions, rows, u)
        for k in contexts:
            k.num_fits += 1
        steps = torch.tensor([max(k.steps, 1) for k in contexts], dtype=torch.float64)
        self.loss = self.loss_sums / steps.to(self.loss_sums.device, non_blocking=True)

    def _batches(
        self, generators: Sequence[tuple[torch.Generator, torch.Generator | None]]
    ) -> Iterator[tuple[Sequence[int], Tensor, Tensor | None]]:
        """Yield the batches of one epoch.

        Args:
            generators: for each client, the random generators for the sample order and the augmentation.

        Yields:
            The positions of the clients that take a step; the indices (clients, B) of the samples in their batches; and
            the random numbers (clients, B, columns) for the augmentation of these samples, or None without
            augmentation.
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
        for s in range(self.batch_counts[0][0]):
            assert size is not None
            count = sum(full > s for full, _ in self.batch_counts)  # of clients
            columns = slice(s * size, (s + 1) * size)
            yield range(count), padded[:count, columns], None if u is None else u[:count, columns]
        for rest in sorted({rest for _, rest in self.batch_counts if rest}, reverse=True):
            positions = [i for i, (_, each) in enumerate(self.batch_counts) if each == rest]
            first = [self.batch_counts[i][0] * (size or 0) for i in positions]
            parts = [(i, slice(at, at + rest)) for i, at in zip(positions, first, strict=True)]
            rows = torch.stack([padded[part] for part in parts])
            yield positions, rows, None if u is None else torch.stack([u[part] for part in parts])

    def _load_batch(self, positions: Sequence[int], rows: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the samples x (clients, B, ...) and targets y (clients, B) of one batch per client.

        Args:
            positions: the positions of the clients among all clients.
            rows: the indices (clients, B) of the samples.
            u: the random numbers used to augment the samples; None: no augmentation.
        """
        shards = [self.trainer.data.train[self.clients[i].id] for i in positions]
        x, y = shards[0].x, shards[0].y
        if all(shard.x is x and shard.y is y for shard in shards):
            flat = rows.reshape(-1)
            x, y = gather_samples(x, flat, None if u is None else u.flatten(0, 1)), y.index_select(0, flat)
        else:
            single = list(zip(shards, rows, [None] * len(rows) if u is None else u, strict=True))
            x = torch.cat([gather_samples(shard.x, each, v) for shard, each, v in single])
            y = torch.cat([shard.y.index_select(0, each) for shard, each, _ in single])
        return x.unflatten(0, rows.shape), y.unflatten(0, rows.shape)

    def write_differences(self, w0: Tensor, rows: Tensor, positions: Sequence[int]) -> None:
        """Write w - w0 of the i-th client into row positions[i] of `rows` (n, d), for all clients."""
        in_order = list(positions) == list(range(len(rows)))
        out = rows if in_order else torch.empty_like(rows)
        self.steps.write_differences(w0, out)
        if not in_order:
            rows[positions] = out

    def weights(self) -> Tensor:
        """Return the clients' weights (n, d)."""
        if isinstance(self.steps, VmapSteps):
            return self.steps.w
        w0, w = self.clients[0].w0, self.clients[0].w0.new_empty(len(self.clients), len(self.clients[0].w0))
        self.steps.write_differences(w0, w)
        return w.add_(w0)

    def _step(self, positions: Sequence[int], rows: Tensor, u: Tensor | None) -> None:
        """Take one step for the clients at these positions, on samples `rows`, augmented with the random numbers u."""
        members: ClientIndex = slice(positions[0], positions[-1] + 1)
        if positions[-1] - positions[0] != len(positions) - 1:
            members = torch.tensor(positions).to(rows.device, non_blocking=True)
        if isinstance(self.steps, VmapSteps):
            self.steps.view.members = positions
        losses = self.steps.step(members, *self._load_batch(positions, rows, u), self.clients[0].lr)
        self.loss_sums[members] += losses.double()
        for i in positions:
            client, momentum = self.clients[i], self.trainer.local_training.momentum
            self.momentum_sums[i] = momentum * self.momentum_sums[i] + 1
            client.steps, client.gradient_weight = client.steps + 1, client.gradient_weight + self.momentum_sums[i]
