"""A validation part of each client's own training samples, held out before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.data.batches import Shard
from fedmpi.data.federated import Federated, count_labels


def held_out(n: int, share: float) -> int:
    """How many of n samples: floor(share n), at least one where there are two; one is always left to train on."""
    return min(max(int(share * n + 1e-9), 1), n - 1) if share else 0


def _drawn(n: int, share: float, group: Tensor | None, generator: torch.Generator) -> Tensor:
    """(n,) bool: which of a client's samples are put aside. Of several groups one is always left to train on."""
    group = torch.arange(n) if group is None else group
    _, number, many = group.unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(many), generator=generator)
    before = many[order].cumsum(0) - many[order]  # samples of the groups that are drawn earlier
    return torch.isin(number, order[:-1][before[:-1] < held_out(n, share)])


def hold_out(data: Federated, share: float, seed: int) -> Federated:
    """The federation with a part of every client's training samples put aside, drawn by client.

    share: of a client's training samples, 0 <= share < 1; 0 leaves the data as they are. Where rows belong to groups
    (`Dataset.group`) whole groups are put aside, until they have so many samples. Of clients whose rows this rank does
    not see (silos) label counts and validation_sizes are zero, and train_sizes as they were.
    """
    if not share:
        return data
    train, validation = {}, {}
    held = np.zeros(data.clients, dtype=np.int64)
    counts = np.zeros_like(data.label_counts)
    for client, shard in data.train.items():
        out = _drawn(len(shard), share, data.group.get(client), seeds.generator(seed, "validation", client))
        validation[client] = Shard(shard.x, shard.y, shard.index[out])
        train[client] = Shard(shard.x, shard.y, shard.index[~out])
        counts[client] = count_labels(shard.y[train[client].index], data.classes)
        held[client] = int(out.sum())
    parts = None if data.parts is None else [train[k].index.numpy() for k in range(data.clients)]
    left = replace(data, train_sizes=data.train_sizes - held, validation_sizes=held)
    return replace(left, train=train, validation=validation, label_counts=counts, parts=parts)
