"""Fed-Heart-Disease: the UCI files as FLamby has them, row by row, so that its published tables can be compared.

Ogier du Terrail et al. FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings. NeurIPS 2022; flamby/datasets/fed_heart_disease/dataset.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import joined

KEPT, CP, RESTECG = (0, 1, 3, 4, 5, 7, 8, 9), 2, 6  # columns of UCI's files; slope, ca and thal are left out
TRAIN = 0.66


def hospital(table: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
    """x (n, 13) float32 in the files' units, y (n,), train (n,) bool, of one hospital's table (n', 14).

    Patients with a gap among the first ten measurements are left out; cholesterol 0 stays. cp and restecg become
    columns of 0 and 1 but for their first values. The test part is scikit-learn's, stratified where either class has
    more than two patients.
    """
    from sklearn.model_selection import train_test_split  # takes a second to import

    table = table[~np.isnan(table[:, :10]).any(1)]
    y = (table[:, -1] > 0).astype(np.int64)
    dummies = [table[:, CP] == value for value in (2, 3, 4)] + [table[:, RESTECG] == value for value in (1, 2)]
    x = np.concatenate([table[:, KEPT], np.stack(dummies, axis=1)], axis=1)
    counts = np.unique(y, return_counts=True)[1]
    _, test = train_test_split(
        np.arange(len(y)),
        test_size=1.0 - TRAIN,
        train_size=TRAIN,
        random_state=43,
        shuffle=True,
        stratify=y if len(counts) > 1 and counts.min() > 2 else None,
    )
    return torch.from_numpy(x).float(), torch.from_numpy(y), ~np.isin(np.arange(len(y)), test)


def dataset(tables: Sequence[np.ndarray], names: Sequence[str], pooled: bool = False) -> Dataset:
    """All hospitals, each standardised by its own training part; the global test set by that of all together.

    pooled: training rows, too, by that of all together, as FLamby's pooled training has them.
    """
    parts = [hospital(table) for table in tables]
    sites = [_standardised(*part) for part in parts]
    if len(sites) == 1:
        return sites[0]
    mean, std = _moments(torch.cat([x[torch.from_numpy(train)] for x, _, train in parts]))
    raw = torch.cat([x[torch.from_numpy(~train)] for x, _, train in parts])
    made = joined(sites, names, global_x=(raw - mean) / std)
    if pooled:
        raw = torch.cat([x[torch.from_numpy(train)] for x, _, train in parts])
        made = replace(made, train_x=(raw - mean) / std)
    return made


def _standardised(x: Tensor, y: Tensor, train: np.ndarray) -> Dataset:
    first, last = torch.from_numpy(train), torch.from_numpy(~train)
    mean, std = _moments(x[first])
    x = (x - mean) / std
    return Dataset(x[first], y[first], x[last], y[last], classes=2)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and unbiased standard deviation + 1e-9, as there."""
    return x.mean(0), x.std(0) + 1e-9
