"""A validation part of each client's own training samples, held out before training."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.text import shorten
from fedmpi.data.batches import Shard, Shards
from fedmpi.data.federated import Federated, count_labels, label_counts
from fedmpi.data.partitions.parts import Partition


def hold_out(data: Federated, share: float, seed: int) -> Federated:
    """The federation with a part of every client's training samples put aside, drawn by client.

    share: of a client's training samples, 0 <= share < 1; 0 leaves the data as they are. Where rows belong to groups
    (`Dataset.group`) whole groups are put aside, in the order of a draw each that brings their samples nearer to that
    number; the smallest where none does; of a client with one group none, which is told. Of clients whose rows this
    rank does not see (silos) label counts and validation_sizes are zero, and train_sizes as they were.
    """
    if not share:
        return data
    new = _of_one_data_set(data, share, seed) if isinstance(data.train, Shards) else _of_several(data, share, seed)
    alone = [k for k in data.train if data.train_sizes[k] > 1 and not new.validation_sizes[k]]
    if alone:
        reason = "the rows there are all of one group (data.group_column), and stay together"
        warnings.warn(f"data.validation holds out nothing of clients {shorten(str(alone))}: {reason}", stacklevel=2)
    return replace(new, train_sizes=data.train_sizes - new.validation_sizes)


def validation_size(n: int, share: float) -> int:
    """How many of n samples are held out: floor(share n), at least one where there are two, never the last one."""
    return min(max(int(share * n + 1e-9), 1), n - 1) if share else 0


def _draw(data: Federated, client: int, n: int, share: float, seed: int) -> Tensor:
    """(n,) bool: which of a client's samples are put aside. Of several groups one is always left to train on."""
    generator, wanted = seeds.generator(seed, "validation", client), validation_size(n, share)
    group = data.group.get(client)
    if group is None:
        out = torch.zeros(n, dtype=torch.bool)
        out[torch.randperm(n, generator=generator)[:wanted]] = True
        return out
    _, number, many = group.unique(return_inverse=True, return_counts=True)
    order, size = torch.randperm(len(many), generator=generator).tolist(), many.tolist()
    chosen: list[int] = []
    total = 0
    for g in order:
        nearer = abs(total + size[g] - wanted) < abs(total - wanted)
        if nearer and len(chosen) < len(order) - 1:
            chosen.append(g)
            total += size[g]
    if not chosen and len(order) > 1:  # all are large
        chosen = [min(order, key=size.__getitem__)]
    return torch.isin(number, torch.tensor(chosen, dtype=torch.int64))


def _of_one_data_set(data: Federated, share: float, seed: int) -> Federated:
    """`hold_out` where all clients have rows of the same x and y."""
    train = data.train
    assert isinstance(train, Shards)
    assert isinstance(train.rows, Partition)
    order, offsets, owner = train.rows.order, train.rows.offsets.tolist(), train.rows.owner
    out = np.zeros(len(order), dtype=bool)
    for k, (first, end) in enumerate(pairwise(offsets)):
        if validation_size(end - first, share):
            out[first:end] = _draw(data, k, end - first, share, seed).numpy()
    sizes = np.bincount(owner[out], minlength=data.clients)
    left = Partition.from_sizes(order[~out], train.rows.sizes - sizes)
    return replace(
        data,
        train=Shards(train.x, train.y, left),
        validation=Shards(train.x, train.y, Partition.from_sizes(order[out], sizes)),
        validation_sizes=sizes,
        label_counts=label_counts(train.y, data.classes, left),
        parts=left,
    )


def _of_several(data: Federated, share: float, seed: int) -> Federated:
    """`hold_out` where clients have data of their own, of which this rank may see some."""
    train, validation = {}, {}
    sizes, counts = np.zeros(data.clients, dtype=np.int64), np.zeros_like(data.label_counts)
    for k, shard in data.train.items():
        out = _draw(data, k, len(shard), share, seed)
        validation[k] = Shard(shard.x, shard.y, shard.index[out])
        train[k] = Shard(shard.x, shard.y, shard.index[~out])
        counts[k] = count_labels(shard.y[train[k].index], data.classes)
        sizes[k] = int(out.sum())
    parts = None if data.parts is None else Partition.from_parts(train[k].index.numpy() for k in range(data.clients))
    return replace(data, train=train, validation=validation, validation_sizes=sizes, label_counts=counts, parts=parts)
