"""Pathological label skew: every client has samples of a few classes, by shards or by a number of classes."""

from __future__ import annotations

import warnings
from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.base import Partition, check_class_labels, check_enough_samples, equal_sizes


def shards(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    s: Annotated[int, Field(ge=1)] = 2,
    distinct: bool = False,
    sorted: bool = False,
) -> Partition:
    """Every client gets s shards of one class each, so at most s classes (McMahan 2017; FedRep, Collins 2021).

    r = floor(s N / C); each of the C classes is cut into r equal shards (the first ones get one sample more if r does
    not divide the class). The list of labels, each r times, is shuffled and reshaped to (N, s): client k takes, for
    each of its s labels, a random unused shard of that label. If C does not divide s N, the first s N - r C classes are
    cut into r + 1 shards, with a warning.
    distinct: every client has exactly s classes, by random exchanges of labels between clients.
    sorted: McMahan's original form: samples are sorted by label and cut into s N equal shards, which may contain two
    classes, and each client gets s of them.
    """
    check_class_labels(labels, "shards")
    check_enough_samples(len(labels), clients * s, "shards", unit=f"clients x s = {clients} x {s} shards")
    if sorted:
        if distinct:
            raise UserError("data.partition: `sorted` shards straddle classes, so `distinct` cannot hold; choose one")
        owner, shard_owner = np.empty(len(labels), dtype=np.int64), np.empty(clients * s, dtype=np.int64)
        shard_owner[rng.permutation(clients * s)] = np.repeat(np.arange(clients), s)
        owner[np.argsort(labels, kind="stable")] = np.repeat(shard_owner, equal_sizes(len(labels), clients * s))
        return Partition.from_owners(owner, clients)
    present = np.unique(labels)
    cuts = equal_sizes(clients * s, len(present))  # (C,) shards of each class
    if cuts.min() == 0:
        what = f"clients x s = {clients * s} shards are fewer than the {len(present)} classes"
        raise UserError(f"data.partition: {what}, so some would be left out; raise `clients` or `s`")
    if cuts.min() < cuts.max():
        what = f"{len(present)} classes do not divide clients x s = {clients * s} shards; the first"
        rest = f"{(cuts > cuts.min()).sum()} classes are cut into {cuts.max()} shards, the others into {cuts.min()}"
        warnings.warn(f"data.partition: {what} {rest}", stacklevel=2)
    if distinct and s > len(present):
        raise UserError(
            f"data.partition: s={s} distinct classes a client, but there are {len(present)} classes; lower `s`"
        )
    names = rng.permutation(np.repeat(np.arange(len(present)), cuts)).reshape(clients, s)
    while distinct and not _exchange_repeated_labels(names, len(present), rng):
        names = rng.permutation(names.ravel()).reshape(clients, s)
    return deal_shards(labels, present[names], rng)


def deal_shards(labels: np.ndarray, names: np.ndarray, rng: np.random.Generator) -> Partition:
    """Divide each class into equal shards, and assign them at random to the clients that are to hold this class.

    Args:
        names: label matrix (N, s): client k gets a shard of each of the classes names[k].
    """
    clients, s = names.shape
    owner = np.full(len(labels), -1)
    for label, cuts in zip(*np.unique(names, return_counts=True), strict=True):
        rows = np.flatnonzero(labels == label)
        if len(rows) < cuts:
            what = f"class {label} has {len(rows)} samples, fewer than the {cuts} shards it must be cut into"
            raise UserError(f"data.partition: {what} for clients={clients}, s={s}; lower one of them")
        shard_owner = np.empty(cuts, dtype=np.int64)
        shard_owner[rng.permutation(cuts)] = np.repeat(np.arange(clients), (names == label).sum(1))
        owner[rows] = np.repeat(shard_owner, equal_sizes(len(rows), cuts))
    parts = Partition.from_owners(owner, clients)
    parts.label_matrix = names
    return parts


def _exchange_repeated_labels(names: np.ndarray, classes: int, rng: np.random.Generator) -> bool:
    """Exchange labels in place until no client has one twice; return False if stuck (in tiny cases only).

    Client i has label a twice. It takes a label b, which it lacks, from a client j that lacks a, and gives a in return:
    i loses one repetition and j gains none, so the number of repetitions falls with every exchange.
    """
    has = np.zeros((len(names), classes), dtype=np.int64)  # how often client k has class c
    np.add.at(has, (np.arange(len(names))[:, None], names), 1)
    while (has > 1).any():
        i, a = rng.choice(np.argwhere(has > 1))
        able = (has[:, a] == 0)[:, None] & (has[i][names] == 0)  # (N, s) slots that i may exchange with
        if not able.any():
            return False
        j, slot = rng.choice(np.argwhere(able))
        b = names[j, slot]
        names[i, np.flatnonzero(names[i] == a)[0]], names[j, slot] = b, a
        has[i, [a, b]] += [-1, 1]
        has[j, [a, b]] += [1, -1]
    return True


def classes(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[int, Field(ge=1)] = 2,
) -> Partition:
    """Every client has the same number of classes, each divided evenly among its clients (NIID-Bench, Li 2022).

    Client i has class i mod C and classes_per_client - 1 others, uniform without replacement. The shuffled samples of a
    class are divided into equal parts for its clients. A class that no client has, which is possible only for N < C, is
    left out.

    classes_per_client: number of classes of each client
    """
    check_class_labels(labels, "classes")
    check_enough_samples(len(labels), clients, "classes")
    names = np.unique(labels)
    if classes_per_client > len(names):
        raise UserError(
            f"data.partition: classes_per_client={classes_per_client}, but there are {len(names)} classes; lower it"
        )
    holds = np.zeros((clients, len(names)), dtype=bool)
    for i, row in enumerate(holds):
        own = i % len(names)
        row[own] = True
        row[rng.permutation(np.delete(np.arange(len(names)), own))[: classes_per_client - 1]] = True
    owner = np.full(len(labels), -1)
    for c, label in enumerate(names):
        owners, rows = np.flatnonzero(holds[:, c]), rng.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(owners):
            what = f"class {label} has {len(rows)} samples for the {len(owners)} clients that drew it"
            raise UserError(f"data.partition: {what}; lower `clients` or `classes_per_client`")
        if len(owners):
            owner[rows] = np.repeat(owners, equal_sizes(len(rows), len(owners)))
    return Partition.from_owners(owner, clients)
