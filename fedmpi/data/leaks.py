"""A warning of features from which a model learns what it must not: the target itself."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from fedmpi.common.text import enumerated
from fedmpi.data.dataset import Dataset, is_labels

CHANCE = 1e-3  # of a warning for features that are drawn at random


def warn_of_leaks(data: Dataset, survival: bool = False, whose: str = "") -> None:
    """Warn once of features (columns of train_x) each of which alone gives the class in the rows of every site.

    A feature does if the classes lie in intervals of its values that do not overlap. survival: whether targets are
    event and time; the event is the class then. whose: the silo, as the message names it.
    """
    x, y = data.train_x, data.train_y
    y = (y[:, 0] == 1).long() if survival and y.ndim == 2 else y
    if not (
        isinstance(x, Tensor)
        and x.ndim == 2
        and x.is_floating_point()
        and is_labels(y, 2 if survival else data.classes)
    ):
        return
    owner = torch.zeros(len(y)) if data.site is None else data.site
    sites = [
        rows for rows in (torch.nonzero(owner == k).flatten() for k in owner.unique()) if len(y[rows].unique()) > 1
    ]
    # Of features at random one in exp(-log_chance) separates the classes: prod_c m_c! c! / n! of the orders do.
    log_chance = math.log(x.shape[1])
    columns = torch.arange(x.shape[1])
    for rows in sites:
        counts = y[rows].unique(return_counts=True)[1]
        log_chance += sum(math.lgamma(m + 1) for m in (*counts.tolist(), len(counts))) - math.lgamma(len(rows) + 1)
        for some in (rows[:: max(len(rows) // 2000, 1)], rows):  # few rows exclude most columns, and are fast
            columns = columns[_separates(x[some[:, None], columns], y[some])] if len(columns) else columns
    if sites and len(columns) and log_chance < math.log(CHANCE):
        width = x.shape[1]
        has_names = len(data.meaning) > width and data.meaning[width] == "->"
        which = enumerated([data.meaning[k] if has_names else str(k) for k in columns.tolist()], "feature")
        warnings.warn(
            f"data{whose}: {which} alone separates the {'events' if survival else 'classes'} of the training rows; "
            "look whether it was known before the label, and leave it out (data.drop) if not",
            stacklevel=2,
        )


def _separates(x: Tensor, y: Tensor) -> Tensor:
    """(f,) bool: whether the values of the classes in y (n,) lie in disjoint intervals, for each column of x (n, f)."""
    classes, member = y.unique(return_inverse=True)
    place, out = member[:, None].expand_as(x), x.new_zeros(len(classes), x.shape[1])
    low, high = (out.scatter_reduce(0, place, x, how, include_self=False) for how in ("amin", "amax"))
    order = low.argsort(0)
    return (high.gather(0, order)[:-1] < low.gather(0, order)[1:]).all(0)
