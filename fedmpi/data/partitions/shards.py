"""Pathological label skew: every client has samples of only a few classes (schemes `shards` and `classes`)."""

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
    """Every client gets s single-class shards, and thus has at most s classes (McMahan 2017; FedRep, Collins 2021).

    Each of the C classes is cut into r = floor(s N / C) equal shards, for N clients (the first shards have one more
    sample if r does not divide the number of samples). A list with r copies of each label is shuffled and reshaped to
    (N, s): client k gets a random unused shard of each of its s labels. If C does not divide s N, the first s N - r C
    classes are cut into r + 1 shards, with a warning.

    s: number of shards per client.
    distinct: true gives every client exactly s classes, by random exchanges of labels between clients.
    sorted: true uses McMahan's original form: samples are sorted by label and cut into s N equal shards, which may
    contain two classes, and each client gets s of them.
    """
    check_class_labels(labels, "shards")
    check_enough_samples(
        len(labels), clients * s, "shards", unit=f"clients x s = {clients} x {s} = {clients * s} shards"
    )
    if sorted:
        if distinct:
            raise UserError(
                "data.partition: sorted and distinct cannot both be true, because sorted shards may contain two "
                "classes; set one of them to false"
            )
        owner, shard_owner = np.empty(len(labels), dtype=np.int64), np.empty(clients * s, dtype=np.int64)
        shard_owner[rng.permutation(clients * s)] = np.repeat(np.arange(clients), s)
        owner[np.argsort(labels, kind="stable")] = np.repeat(shard_owner, equal_sizes(len(labels), clients * s))
        return Partition.from_owners(owner, clients)
    present = np.unique(labels)
    cuts = equal_sizes(clients * s, len(present))  # (C,) shards of each class
    if cuts.min() == 0:
        problem = (
            f"the number of shards (clients x s = {clients * s}) is less than the number of classes ({len(present)})"
        )
        raise UserError(
            f"data.partition: {problem}, so some classes would be left out; raise data.partition.clients or s"
        )
    if cuts.min() < cuts.max():
        what = (
            f"the number of shards (clients x s = {clients * s}) is not a multiple of the number of classes "
            f"({len(present)})"
        )
        rest = (
            f"{(cuts > cuts.min()).sum()} classes are split into {cuts.max()} shards each, the others into {cuts.min()}"
        )
        warnings.warn(f"data.partition: {what}; the first {rest}", stacklevel=2)
    if distinct and s > len(present):
        raise UserError(
            f"data.partition.s: {s} distinct classes per client are impossible, because the data have only "
            f"{len(present)}; lower data.partition.s"
        )
    label_matrix = rng.permutation(np.repeat(np.arange(len(present)), cuts)).reshape(clients, s)
    while distinct and not _exchange_repeated_labels(label_matrix, len(present), rng):
        label_matrix = rng.permutation(label_matrix.ravel()).reshape(clients, s)
    return deal_shards(labels, present[label_matrix], rng)


def deal_shards(labels: np.ndarray, label_matrix: np.ndarray, rng: np.random.Generator) -> Partition:
    """Cut each class into equal shards, and assign them at random to the clients that have this class.

    Args:
        labels: the class of each sample, (n,).
        label_matrix: the classes of each client, (N, s): client k gets one shard of each class in label_matrix[k].
        rng: assigns the shards.
    """
    clients, s = label_matrix.shape
    owner = np.full(len(labels), -1)
    for label, cuts in zip(*np.unique(label_matrix, return_counts=True), strict=True):
        rows = np.flatnonzero(labels == label)
        if len(rows) < cuts:
            problem = f"class {label} has only {len(rows)} samples for {cuts} shards (clients={clients}, s={s})"
            raise UserError(f"data.partition: {problem}; lower data.partition.clients or s")
        shard_owner = np.empty(cuts, dtype=np.int64)
        shard_owner[rng.permutation(cuts)] = np.repeat(np.arange(clients), (label_matrix == label).sum(1))
        owner[rows] = np.repeat(shard_owner, equal_sizes(len(rows), cuts))
    parts = Partition.from_owners(owner, clients)
    parts.label_matrix = label_matrix
    return parts


def _exchange_repeated_labels(label_matrix: np.ndarray, classes: int, rng: np.random.Generator) -> bool:
    """Exchange labels between clients, in place, until no client has a label twice.

    A client i that has label `a` twice gives one copy to a client j that does not have `a`, and receives in return a
    label b that i does not have. Each exchange thus removes a repetition from i and creates none at j.

    Args:
        label_matrix: the labels of each client, (N, s).
        classes: number of classes.
        rng: draws the exchanges.

    Returns:
        Whether this succeeded; with very few clients there may be no suitable exchange.
    """
    has = np.zeros((len(label_matrix), classes), dtype=np.int64)  # how often client k has class c
    np.add.at(has, (np.arange(len(label_matrix))[:, None], label_matrix), 1)
    while (has > 1).any():
        i, a = rng.choice(np.argwhere(has > 1))
        able = (has[:, a] == 0)[:, None] & (has[i][label_matrix] == 0)  # (N, s) labels that i may take
        if not able.any():
            return False
        j, slot = rng.choice(np.argwhere(able))
        b = label_matrix[j, slot]
        label_matrix[i, np.flatnonzero(label_matrix[i] == a)[0]], label_matrix[j, slot] = b, a
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

    Of C classes, client i has class i mod C and classes_per_client - 1 others, drawn at random without replacement. The
    shuffled samples of a class are divided into equal parts for its clients. With fewer clients than classes, some
    classes may have no client; their samples are left out.

    classes_per_client: number of classes of each client.
    """
    check_class_labels(labels, "classes")
    check_enough_samples(len(labels), clients, "classes")
    present = np.unique(labels)
    if classes_per_client > len(present):
        raise UserError(
            f"data.partition.classes_per_client: {classes_per_client} is too large, because the data have only "
            f"{len(present)} classes; "
            f"set it to at most {len(present)}"
        )
    has_class = np.zeros((clients, len(present)), dtype=bool)
    for i, row in enumerate(has_class):
        own = i % len(present)
        row[own] = True
        row[rng.permutation(np.delete(np.arange(len(present)), own))[: classes_per_client - 1]] = True
    owner = np.full(len(labels), -1)
    for c, label in enumerate(present):
        owners, rows = np.flatnonzero(has_class[:, c]), rng.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(owners):
            problem = f"class {label} has only {len(rows)} samples for {len(owners)} clients"
            raise UserError(f"data.partition: {problem}; lower data.partition.clients or classes_per_client")
        if len(owners):
            owner[rows] = np.repeat(owners, equal_sizes(len(rows), len(owners)))
    return Partition.from_owners(owner, clients)
