"""A validation part of each client's own training samples, held out before training."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.text import brief
from fedmpi.data.batches import Shard
from fedmpi.data.federated import Federated, count_labels


def held_out(n: int, share: float) -> int:
    """How many of n samples: floor(share n), at least one where there are two; one is always left to train on."""
    return min(max(int(share * n + 1e-9), 1), n - 1) if share else 0


def _drawn(n: int, share: float, group: Tensor | None, generator: torch.Generator) -> Tensor:
    """(n,) bool: which of a client's samples are put aside. Of several groups one is always left to train on."""
    wanted = held_out(n, share)
    if group is None:
        out = torch.zeros(n, dtype=torch.bool)
        out[torch.randperm(n, generator=generator)[:wanted]] = True
        return out
    _, number, many = group.unique(return_inverse=True, return_counts=True)
    order, size = torch.randperm(len(many), generator=generator).tolist(), many.tolist()
    taken: list[int] = []
    held = 0
    for g in order:
        nearer = abs(held + size[g] - wanted) < abs(held - wanted)
        if nearer and len(taken) < len(order) - 1:
            taken.append(g)
            held += size[g]
    if not taken and len(order) > 1:  # all are large
        taken = [min(order, key=size.__getitem__)]
    return torch.isin(number, torch.tensor(taken, dtype=torch.int64))


def hold_out(data: Federated, share: float, seed: int) -> Federated:
    """The federation with a part of every client's training samples put aside, drawn by client.

    share: of a client's training samples, 0 <= share < 1; 0 leaves the data as they are. Where rows belong to groups
    (`Dataset.group`) whole groups are put aside, in the order of a draw each that brings their samples nearer to that
    number; the smallest where none does; of a client with one group none, which is told. Of clients whose rows this
    rank does not see (silos) label counts and validation_sizes are zero, and train_sizes as they were.
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
    alone = [client for client, shard in data.train.items() if len(shard) > 1 and not held[client]]
    if alone:
        whose = f"{'clients' if len(alone) > 1 else 'client'} {brief(', '.join(map(str, alone)))}"
        said = "the rows there are all of one group (data.group_column), and stay together"
        warnings.warn(f"data.validation holds out nothing of {whose}: {said}", stacklevel=2)
    parts = None if data.parts is None else [train[k].index.numpy() for k in range(data.clients)]
    left = replace(data, train_sizes=data.train_sizes - held, validation_sizes=held)
    return replace(left, train=train, validation=validation, label_counts=counts, parts=parts)
