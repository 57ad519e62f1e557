"""Which test rows are a client's own.

shards       the test part cut into shards and dealt like the training part, by the same label matrix (FedRep 2021)
class_match  all test rows of the classes it trains on
aligned      of class c  floor(T n_kc / n_k)  rows of its t_c test rows, without replacement; clients overlap. T: 1000
             (FedSOL 2024), or as many as all its classes have rows for, min_c floor(t_c n_k / n_kc): FedSOL's own
             min(t_c, .) would leave a small test part's classes alike that the client has in unlike numbers. Classes
             without a test row do not count. Where that is 0 for all classes of a client, one row each of those of
             them, at most 1000, that it has most of
global       the whole test part
site         the test rows of its site
auto         site if clients are sites and the data set knows the sites of the test rows; else aligned, or global where
             targets are no class numbers
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.data.batches import PerClient
from fedmpi.data.dataset import Dataset, is_labels
from fedmpi.data.partitions.parts import Partition
from fedmpi.data.partitions.shards import deal

ClientTest = Literal["auto", "site", "aligned", "shards", "class_match", "global"]
ALIGNED_SIZE = 1000  # FedSOL's choice; a class of share n_kc / n_k gets that share of it
BLOCK = 1 << 16  # clients whose sizes are computed at once


def client_tests(
    dataset: Dataset,
    counts: np.ndarray,
    client_test: ClientTest,
    at: np.ndarray | None,
    seed: int,
    names: np.ndarray | None = None,
) -> tuple[np.ndarray, PerClient[Any]]:
    """Return the number of test rows of each client, (N,), and its rows, which are computed on first access.

    counts: (N, classes) training labels; at: (N,) its site, if it has one; names: (N, s) the class of each training
    shard, where clients hold shards. Raises UserError if the data do not allow `client_test`.
    """
    if client_test not in get_args(ClientTest):
        raise UserError(f"data.client_test is {client_test!r}; allowed: {', '.join(get_args(ClientTest))}")
    regression = not is_labels(dataset.train_y, dataset.classes)
    if client_test == "auto":
        known = at is not None and dataset.test_site is not None
        client_test = "site" if known else "global" if regression else "aligned"
    if client_test == "global":
        every = torch.arange(len(dataset.test_y))
        return np.full(len(counts), len(every)), PerClient(len(counts), lambda k: every)
    if client_test == "site":
        if at is None or dataset.test_site is None:
            needed = "partition scheme site or domain, and a data set with test_site"
            raise UserError(f"data.client_test: site needs {needed}; take aligned")
        sites = max(int(at.max()), int(dataset.test_site.max()) if len(dataset.test_site) else 0) + 1
        return _by_client(Partition.from_owners(dataset.test_site.numpy(), sites), at)
    if regression:
        raise UserError(
            f"data.client_test: {client_test} selects by class, but targets are no class numbers; take global"
        )
    if client_test == "shards":
        if names is None:
            raise UserError("data.client_test: shards needs partition scheme shards without `sorted`; take aligned")
        test_y = dataset.test_y.numpy()
        scarce = next((c for c in np.unique(names) if (test_y == c).sum() < (names == c).sum()), None)
        if scarce is not None:
            rows, shards = (test_y == scarce).sum(), (names == scarce).sum()
            what = f"the {rows} test rows of class {scarce} into {shards}"
            raise UserError(f"data.client_test: shards cannot cut {what}; take class_match")
        return _by_client(deal(test_y, names, seeds.numpy_rng(seed, "test shards")), np.arange(len(counts)))
    of_class = Partition.from_owners(dataset.test_y.numpy(), counts.shape[1])
    there = of_class.sizes
    # In blocks of clients, so that what is computed on the way stays small.
    blocks = [counts[first : first + BLOCK] for first in range(0, len(counts), BLOCK)]
    if client_test == "class_match":
        sizes = np.concatenate([(block > 0) @ there for block in blocks])
        seen = cache(lambda k: torch.from_numpy(counts[k] > 0)[dataset.test_y].nonzero().flatten())
        return sizes, PerClient(len(counts), seen)

    @cache
    def aligned(k: int) -> Tensor:
        rng, quota = seeds.numpy_rng(seed, "client_test", k), _quotas(counts[k : k + 1], there)[0]
        rows = [rng.permutation(of_class[c])[: quota[c]] for c in np.flatnonzero(quota).tolist()]
        return torch.from_numpy(np.sort(np.concatenate(rows))) if rows else torch.zeros(0, dtype=torch.int64)

    return np.concatenate([_quotas(block, there).sum(1) for block in blocks]), PerClient(len(counts), aligned)


def _by_client(parts: Partition, at: np.ndarray) -> tuple[np.ndarray, PerClient[Any]]:
    """Client k has part at[k]."""
    return parts.sizes[at], PerClient(len(at), lambda k: torch.from_numpy(parts[at[k]]))


def _quotas(counts: np.ndarray, there: np.ndarray) -> np.ndarray:
    """How many test rows of each class `aligned` gives to clients: (B, classes).

    Args:
        counts: (B, classes) training samples.
        there: (classes,) test rows.
    """
    total = counts.sum(1, keepdims=True)
    both = (counts > 0) & (there > 0)
    most = np.where(both, there * total // np.maximum(counts, 1), ALIGNED_SIZE).min(1, initial=ALIGNED_SIZE)
    quotas = np.where(both, most[:, None] * counts // total, 0)
    few = np.flatnonzero(~quotas.any(1))  # clients for which there are too few rows to be shared out
    if len(few):
        place = np.argsort(np.argsort(-np.where(both[few], counts[few], 0), axis=1, kind="stable"), axis=1)
        quotas[few] = place < np.minimum(both[few].sum(1, keepdims=True), ALIGNED_SIZE)
    return quotas
