"""Warnings of features that tell the target of a sample alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedmpi.common.text import enumerated
from fedmpi.data.dataset import Dataset, is_labels

CHANCE = 1e-3  # of a warning for features that are drawn at random
GLANCE = 2000  # rows that are looked at before all are


def warn_of_leaks(data: Dataset, survival: bool = False, whose: str = "") -> None:
    """Warn once of features (columns of train_x) each of which tells the target alone, in the rows of every site.

    A feature tells a class, or the event of the task survival, if classes lie in intervals of its values that do not
    overlap. It tells the time if, of the rows with an event and of those without, each taken alone, all that have more
    of it live longer, or all shorter: so do a time in other units and a time whose sign marks who is censored.

    Args:
        survival: whether targets (n, 2) are event and time.
        whose: of which silo these are the data, as the message says it.
    """
    x, y = data.train_x, data.train_y
    if not (isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()):
        return
    sites = [torch.arange(len(y))]
    if data.site is not None:
        sites = [torch.nonzero(data.site == k).flatten() for k in data.site.unique().tolist()]
    if is_labels(data.train_y, data.classes):
        what = "separates the classes of the training rows; look whether it was known before the label"
        sort = " (it may number the rows of a file that is sorted by label)"
        _warn(data, _separating(x, y, sites), whose, f"{what}, and leave it out if not{sort}")
    elif survival and y.ndim == 2 and y.shape[1] == 2 and not bool(y.isnan().any()):
        event, time = y.T
        known = "look whether it was known before, and leave it out (data.drop) if not"
        ordering = _ordering(x, time, [rows[event[rows] == seen] for rows in sites for seen in (0, 1)])
        _warn(data, ordering, whose, f"gives the order of the times of the training rows; {known}")
        separating = [k for k in _separating(x, event.long(), sites) if k not in ordering]
        _warn(data, separating, whose, f"tells the event of all training rows; {known}")


def _warn(data: Dataset, features: Sequence[int], whose: str, what: str) -> None:
    if features:
        width = data.train_x.shape[1]
        named = len(data.meaning) > width and data.meaning[width] == "->"
        which = enumerated([data.meaning[k] if named else str(k) for k in features], "feature")
        warnings.warn(f"data{whose}: {which} alone {what}", stacklevel=3)


def _separating(x: Tensor, y: Tensor, sites: Sequence[Tensor]) -> list[int]:
    """The columns of x (n, f) that separate the classes y (n,) among the rows of every site.

    Of n rows at random with n_c of class c that has the probability k! prod_c n_c! / n!; none is returned where a
    feature of so many would do it by chance.
    """
    log_chance, groups = math.log(x.shape[1]), []
    for rows in sites:
        counts = torch.bincount(y[rows])
        counts = counts[counts > 0]
        if len(counts) > 1:
            log_chance += _log_factorials(counts) + math.lgamma(len(counts) + 1) - math.lgamma(len(rows) + 1)
            groups.append(rows)
    return _left(x, y, groups, _separates) if log_chance < math.log(CHANCE) else []


def _ordering(x: Tensor, time: Tensor, groups: Sequence[Tensor]) -> list[int]:
    """The columns of x (n, f) that order the times (n,) within each group of rows, up or down.

    Of n rows at random, m_t of them with the time t and n_v with the value v, a column does so with a probability of
    at most 2 prod_t m_t! prod_v n_v! / n!; columns that would do it by chance are left out.
    """
    groups = [rows for rows in groups if len(rows) > 1]
    found = []
    for k in _left(x, time, groups, _orders):
        log_chance = math.log(x.shape[1])
        for rows in groups:
            ties = [_log_factorials(v[rows].unique(return_counts=True)[1]) for v in (time, x[:, k])]
            log_chance += min(sum(ties) + math.log(2) - math.lgamma(len(rows) + 1), 0.0)
        if log_chance < math.log(CHANCE):
            found.append(k)
    return found


def _left(x: Tensor, y: Tensor, groups: Sequence[Tensor], holds: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """The columns of x (n, f) for which `holds` is true of every group of rows. A few rows are looked at first."""
    left = torch.arange(x.shape[1])
    for rows in groups:
        for some in (rows[:: max(len(rows) // GLANCE, 1)], rows):
            left = left[holds(x[some[:, None], left], y[some])] if len(left) else left
    found: list[int] = left.tolist()
    return found


def _log_factorials(counts: Tensor) -> float:
    return float(torch.lgamma(counts.double() + 1).sum())


def _separates(x: Tensor, y: Tensor) -> Tensor:
    """(f,) bool: whether the values of the classes in y (n,) lie in disjoint intervals, for each column of x (n, f)."""
    low, high = (
        torch.stack([getattr(x[y == c], end)(0).values for c in y.unique().tolist()]) for end in ("min", "max")
    )
    order = low.argsort(0)
    return (high.gather(0, order)[:-1] < low.gather(0, order)[1:]).all(0)


def _orders(x: Tensor, time: Tensor) -> Tensor:
    """(f,) bool: whether a later time (n,) never has less, or never more, of each column of x (n, f)."""
    _, member, counts = time.unique(return_inverse=True, return_counts=True)
    place = member[:, None].expand_as(x)
    shape = (len(counts), x.shape[1])
    low, high = (x.new_zeros(shape).scatter_reduce(0, place, x, how, include_self=False) for how in ("amin", "amax"))
    return (high[:-1] <= low[1:]).all(0) | (low[:-1] >= high[1:]).all(0)
