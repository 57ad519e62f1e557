"""Warnings of features that tell the class of a sample alone."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from fedmpi.common.text import enumerated
from fedmpi.data.dataset import Dataset

CHANCE = 1e-3  # of a warning for features that are drawn at random
GLANCE = 2000  # rows that are looked at before all are


def warn_of_separating_features(data: Dataset, whose: str = "") -> None:
    """Warn once of features (columns of train_x) each of which separates the classes alone, in the rows of every site.

    A feature separates classes if they lie in intervals of its values that do not overlap. Of n rows at random with n_c
    of class c that has the probability k! prod_c n_c! / n!, and there is no warning where a feature of so many would do
    it by chance. whose: of which silo these are the data, as the message says it.
    """
    x, y = data.train_x, data.train_y
    if not (isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point() and data.labelled):
        return
    sites = [torch.arange(len(y))]
    if data.site is not None:
        sites = [torch.nonzero(data.site == k).flatten() for k in data.site.unique().tolist()]
    log_chance, left = math.log(x.shape[1]), torch.arange(x.shape[1])
    for rows in sites:
        counts = torch.bincount(y[rows])
        counts = counts[counts > 0]
        if len(counts) > 1:
            log_chance += float(torch.lgamma(counts.double() + 1).sum()) + math.lgamma(len(counts) + 1)
            log_chance -= math.lgamma(len(rows) + 1)
            for some in (rows[:: max(len(rows) // GLANCE, 1)], rows):
                left = left[_separates(x[some[:, None], left], y[some])] if len(left) else left
    if len(left) and log_chance < math.log(CHANCE):
        told = len(data.meaning) > x.shape[1] and data.meaning[x.shape[1]] == "->"
        names = [data.meaning[k] if told else str(k) for k in left.tolist()]
        which = enumerated(names, "feature")
        warnings.warn(
            f"data{whose}: {which} alone separates the classes of the training rows; look whether it was known before "
            "the label, and leave it out if not (it may number the rows of a file that is sorted by label)",
            stacklevel=2,
        )


def _separates(x: Tensor, y: Tensor) -> Tensor:
    """(f,) bool: whether the values of the classes in y (n,) lie in disjoint intervals, for each column of x (n, f)."""
    low, high = (
        torch.stack([getattr(x[y == c], end)(0).values for c in y.unique().tolist()]) for end in ("min", "max")
    )
    order = low.argsort(0)
    return (high.gather(0, order)[:-1] < low.gather(0, order)[1:]).all(0)
