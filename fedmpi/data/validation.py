"""A validation part of each client's own training samples, held out before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedmpi.common import seeds
from fedmpi.data.batches import Shard
from fedmpi.data.federated import Federated, count_labels


def held_out(n: int, share: float) -> int:
    """How many of n samples: floor(share n), at least one where there are two; one is always left to train on."""
    return min(max(int(share * n + 1e-9), 1), n - 1) if share else 0


def hold_out(data: Federated, share: float, seed: int) -> Federated:
    """The federation with a part of every client's training samples put aside, drawn by client.

    share: of a client's training samples, 0 <= share < 1; 0 leaves the data as they are. Sizes are those of all
    clients; label counts of clients whose rows this rank does not see (silos) are zero.
    """
    if not share:
        return data
    train, validation = {}, {}
    counts = np.zeros_like(data.label_counts)
    for client, shard in data.train.items():
        order = torch.randperm(len(shard), generator=seeds.generator(seed, "validation", client))
        cut = held_out(len(shard), share)
        validation[client] = Shard(shard.x, shard.y, shard.index[order[:cut].sort().values])
        train[client] = Shard(shard.x, shard.y, shard.index[order[cut:].sort().values])
        counts[client] = count_labels(shard.y[train[client].index], data.classes)
    held = np.array([held_out(int(n), share) for n in data.train_sizes], dtype=np.int64)
    parts = None if data.parts is None else [train[k].index.numpy() for k in range(data.clients)]
    left = replace(data, train_sizes=data.train_sizes - held, validation_sizes=held)
    return replace(left, train=train, validation=validation, label_counts=counts, parts=parts)
