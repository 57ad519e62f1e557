"""Rules that choose the test rows of each client (option data.client_test).

shards       The test part is cut into shards. A client gets test shards of the classes of its training shards (FedRep
             2021).
class_match  All test rows of the classes in the training data of the client.
aligned      Test rows in the proportions of the client's classes. If n_kc of the n_k training samples of client k
             belong to class c, it gets floor(T n_kc / n_k) random test rows of c, without replacement; clients may
             share rows. T is the minimum of 1000 (FedSOL 2024) and floor(t_c n_k / n_kc) over its classes c, where
             t_c > 0 is the number of test rows of class c. FedSOL itself keeps T = 1000 and limits each number of rows
             to t_c, which changes the proportions if the test part is small. If all these numbers are 0 for a client,
             it gets one row of each of its classes, or of the 1000 most frequent ones.
global       The whole test part.
site         The test rows of the client's site.
auto         site if clients are sites and the test rows have sites; otherwise aligned, or global if targets are not
             class numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.data.batches import LazyClientMapping
from fedmpi.data.dataset import Dataset, is_labels
from fedmpi.data.partitions.base import Partition
from fedmpi.data.partitions.shards import deal_shards

ClientTest = Literal["auto", "site", "aligned", "shards", "class_match", "global"]
ClientTestRows = tuple[
    np.ndarray, LazyClientMapping[Any]
]  # (N,) number of test rows of each client; the rows, computed on access
ALIGNED_SIZE = 1000  # T of FedSOL
CLIENTS_PER_BLOCK = 1 << 16  # number of clients for which `aligned` is computed at once, to limit memory


def select_client_tests(
    dataset: Dataset,
    counts: np.ndarray,
    client_test: ClientTest,
    site_of_client: np.ndarray | None,
    seed: int,
    label_matrix: np.ndarray | None = None,
) -> ClientTestRows:
    """Choose the test rows of each client; return the number of rows, (N,), and the row numbers of each client.

    Args:
        counts: number of training samples by client and class, (N, classes).
        client_test: the name of a rule from the module docstring.
        site_of_client: the site of each client, (N,); None if clients are not sites.
        seed: the seed of the run.
        label_matrix: the classes of each client's s training shards, (N, s); None without such shards.

    Raises:
        UserError: the rule cannot be applied to these data.
    """
    if client_test not in get_args(ClientTest):
        allowed = ", ".join(get_args(ClientTest))
        raise UserError(f"data.client_test: {client_test!r} is not allowed; must be one of {allowed}")
    has_labels = is_labels(dataset.train_y, dataset.classes)
    if client_test == "auto":
        has_sites = site_of_client is not None and dataset.test_site is not None
        client_test = "site" if has_sites else "aligned" if has_labels else "global"
    if client_test == "global":
        all_rows = torch.arange(len(dataset.test_y))
        return np.full(len(counts), len(all_rows)), LazyClientMapping(len(counts), lambda k: all_rows)
    if client_test == "site":
        if site_of_client is None or dataset.test_site is None:
            wrong = (
                "data.partition.scheme is not site"
                if site_of_client is None
                else "this data set does not give the site of each test row (array test_site)"
            )
            raise UserError(
                f"data.client_test: site needs the sites of clients and test rows, but {wrong}; set "
                f"data.client_test: aligned{', or data.partition.scheme: site' if site_of_client is None else ''}"
            )
        sites = max(int(site_of_client.max()), int(dataset.test_site.max()) if len(dataset.test_site) else 0) + 1
        return _assign_parts_to_clients(Partition.from_owners(dataset.test_site.numpy(), sites), site_of_client)
    if not has_labels:
        raise UserError(
            f"data.client_test: {client_test} selects test rows by class, but the targets are not class numbers; set "
            "data.client_test: global"
        )
    if client_test == "shards":
        return _deal_test_shards(dataset.test_y.numpy(), label_matrix, seed)
    rows_by_class = Partition.from_owners(dataset.test_y.numpy(), counts.shape[1])
    if client_test == "class_match":
        rows_of_client_classes = cache(lambda k: torch.from_numpy(counts[k] > 0)[dataset.test_y].nonzero().flatten())
        return (counts > 0) @ rows_by_class.sizes, LazyClientMapping(len(counts), rows_of_client_classes)

    @cache
    def aligned(k: int) -> Tensor:
        rng, quota = (
            seeds.numpy_generator(seed, "client_test", k),
            _aligned_quotas(counts[k : k + 1], rows_by_class.sizes)[0],
        )
        rows = [rng.permutation(rows_by_class[c])[: quota[c]] for c in np.flatnonzero(quota).tolist()]
        return torch.from_numpy(np.sort(np.concatenate(rows))) if rows else torch.zeros(0, dtype=torch.int64)

    blocks = np.array_split(counts, 1 + len(counts) // CLIENTS_PER_BLOCK)
    sizes = np.concatenate([_aligned_quotas(block, rows_by_class.sizes).sum(1) for block in blocks])
    return sizes, LazyClientMapping(len(counts), aligned)


def _assign_parts_to_clients(parts: Partition, part_of_client: np.ndarray) -> ClientTestRows:
    """Return the test rows of all clients: client k gets parts[part_of_client[k]]."""
    return parts.sizes[part_of_client], LazyClientMapping(
        len(part_of_client), lambda k: torch.from_numpy(parts[part_of_client[k]])
    )


def _deal_test_shards(test_y: np.ndarray, label_matrix: np.ndarray | None, seed: int) -> ClientTestRows:
    """Cut the test rows into shards, and give each client test shards of the classes of its training shards."""
    if label_matrix is None:
        raise UserError(
            "data.client_test: shards needs data.partition.scheme: shards and data.partition.sorted: false; set these, "
            "or data.client_test: aligned"
        )
    for c, shards in zip(*np.unique(label_matrix, return_counts=True), strict=True):
        rows = (test_y == c).sum()
        if rows < shards:
            problem = f"class {c} has only {rows} test rows for {shards} shards (at least one per shard)"
            raise UserError(f"data.client_test: shards is not possible, because {problem}; set it to class_match")
    return _assign_parts_to_clients(
        deal_shards(test_y, label_matrix, seeds.numpy_generator(seed, "test shards")), np.arange(len(label_matrix))
    )


def _aligned_quotas(counts: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Return how many test rows of each class the rule `aligned` gives to each client, (N, classes).

    Args:
        counts: number of training samples by client and class, (N, classes).
        available: number of test rows by class, (classes,).
    """
    total = counts.sum(1, keepdims=True)
    usable = (counts > 0) & (available > 0)
    largest_total = np.where(usable, available * total // np.maximum(counts, 1), ALIGNED_SIZE).min(
        1, initial=ALIGNED_SIZE
    )
    quotas = np.where(usable, largest_total[:, None] * counts // total, 0)
    without_rows = np.flatnonzero(~quotas.any(1))  # clients for which the formula gives no row
    if len(without_rows):
        rank = np.argsort(
            np.argsort(-np.where(usable[without_rows], counts[without_rows], 0), axis=1, kind="stable"), axis=1
        )
        quotas[without_rows] = rank < np.minimum(usable[without_rows].sum(1, keepdims=True), ALIGNED_SIZE)
    return quotas
