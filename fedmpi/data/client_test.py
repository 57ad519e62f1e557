"""Which test rows are a client's own.

shards       the test part cut into shards and dealt like the training part, by the same label matrix (FedRep 2021);
             class_match, with a warning, where a class has fewer test rows than shards
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

import warnings
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.partitions.shards import deal

ClientTest = Literal["auto", "site", "aligned", "shards", "class_match", "global"]
ALIGNED_SIZE = 1000  # FedSOL's choice; a class of share n_kc / n_k gets that share of it


def client_tests(
    dataset: Dataset,
    counts: np.ndarray,
    client_test: ClientTest,
    at: np.ndarray | None,
    seed: int,
    names: np.ndarray | None = None,
) -> list[Tensor]:
    """Test indices (t_k,) of every client.

    counts: (N, classes) training labels; at: (N,) its site, if it has one; names: (N, s) the class of each training
    shard, where clients hold shards. Raises UserError if the data do not allow `client_test`.
    """
    if client_test not in get_args(ClientTest):
        raise UserError(f"data.client_test is {client_test!r}; allowed: {', '.join(get_args(ClientTest))}")
    regression = not dataset.labelled
    if client_test == "auto":
        known = at is not None and dataset.test_site is not None
        client_test = "site" if known else "global" if regression else "aligned"
    if client_test == "global":
        return [torch.arange(len(dataset.test_y))] * len(counts)
    if client_test == "site":
        if at is None or dataset.test_site is None:
            raise UserError(
                "data.client_test: site needs partition scheme site or domain, and a data set with test_site; take "
                "aligned"
            )
        return [torch.nonzero(dataset.test_site == k).flatten() for k in at.tolist()]
    if regression:
        raise UserError(
            f"data.client_test: {client_test} selects by class, but targets are no class numbers; take global"
        )
    if client_test == "shards":
        if names is None:
            raise UserError(
                "data.client_test: shards needs partition scheme shards without `sorted`; take aligned or class_match"
            )
        test_y = dataset.test_y.numpy()
        scarce = [c for c in np.unique(names) if (test_y == c).sum() < (names == c).sum()]
        if not scarce:
            return [torch.from_numpy(part) for part in deal(test_y, names, seeds.numpy_rng(seed, "test shards"))]
        rows, shards = (test_y == scarce[0]).sum(), (names == scarce[0]).sum()
        warnings.warn(
            f"data.client_test: shards cannot cut the {rows} test rows of class {scarce[0]} into {shards}; every "
            "client is tested on all test rows of its classes instead (class_match)",
            stacklevel=3,
        )
        client_test = "class_match"
    if client_test == "class_match":
        owned = torch.from_numpy(counts > 0)
        return [torch.nonzero(owned[k][dataset.test_y]).flatten() for k in range(len(counts))]
    test_y = dataset.test_y.numpy()
    of_class = [np.flatnonzero(test_y == c) for c in range(counts.shape[1])]
    return [_aligned(of_class, row, seeds.numpy_rng(seed, "client_test", k)) for k, row in enumerate(counts)]


def _aligned(of_class: Sequence[np.ndarray], row: np.ndarray, rng: np.random.Generator) -> Tensor:
    there = np.array([len(rows) for rows in of_class], dtype=np.int64)
    both = (row > 0) & (there > 0)
    size = min((there[both] * row.sum() // row[both]).min(initial=ALIGNED_SIZE), ALIGNED_SIZE)
    quota = np.where(both, size * row // row.sum(), 0)  # (classes,)
    if not quota.any():  # too few rows to be shared out
        quota[np.argsort(-np.where(both, row, 0), kind="stable")[: min(both.sum(), ALIGNED_SIZE)]] = 1
    rows = [rng.permutation(of_class[c])[: quota[c]] for c in np.flatnonzero(quota).tolist()]
    return torch.from_numpy(np.sort(np.concatenate(rows))) if rows else torch.zeros(0, dtype=torch.int64)
