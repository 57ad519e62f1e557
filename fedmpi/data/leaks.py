"""Warnings of columns from which a model learns what it must not: the order of the file, or the target itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.text import enumerated
from fedmpi.data.dataset import Dataset, is_labels

CHANCE = 1e-3  # of a warning for features that are drawn at random
FEW = 20  # rows; whether a column numbers the rows cannot be seen in fewer


def warn_of_row_numbers(path: Path, columns: Iterable[tuple[str, np.ndarray]], owner: np.ndarray) -> None:
    """Warn once of the columns, names with numbers (n,), that number all rows of a file, or those of each site.

    owner: (n,) the number of the site of each row.
    """
    order, ends = np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1]
    names = []
    for name, x in columns:
        sites = [rows for rows in np.split(x[order], ends) if len(rows) >= FEW]
        if numbers_rows(x) or (sites and all(map(numbers_rows, sites))):
            names.append(name)
    if names:
        warnings.warn(
            f"{path}: {enumerated(names, 'column')} numbers the rows; a model that learns from it learns the order of "
            "the file: leave it out, unless it is measured",
            stacklevel=3,
        )


def numbers_rows(x: np.ndarray) -> bool:
    """Return whether the values (n,) number the rows.

    They do if they rise or fall by a constant step, if they are whole numbers that all rise or all fall, or a
    permutation of consecutive numbers.
    """
    if len(x) < FEW or not np.isfinite(x).all():
        return False
    steps = np.diff(x)
    rises_or_falls = bool((steps > 0).all() or (steps < 0).all())
    is_regular = bool((steps == steps[0]).all() or (x == np.floor(x)).all())
    return (rises_or_falls and is_regular) or bool((np.diff(np.sort(x)) == 1).all())


def warn_of_leaks(data: Dataset, survival: bool = False, whose: str = "") -> None:
    """Warn once of features (columns of train_x) each of which gives the target alone, in the rows of every site.

    A feature gives a class, or the event of the task survival, if classes lie in intervals of its values that do not
    overlap. It gives the time if among rows with an event, and among the others, all with more of it live longer, or
    all shorter. survival: whether targets (n, 2) are event and time. whose: the silo, as the message names it.
    """
    x, y = data.train_x, data.train_y
    if not (isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()):
        return
    owner = torch.zeros(len(y)) if data.site is None else data.site
    sites = [torch.nonzero(owner == k).flatten() for k in owner.unique()]
    remedy = "look whether it was known before the label, and leave it out (data.drop) if not"
    if is_labels(data.train_y, data.classes):
        _warn(data, _separating(x, y, sites), whose, f"separates the classes of the training rows; {remedy}")
    elif survival and y.ndim == 2 and y.shape[1] == 2 and not bool(y.isnan().any()):
        event, time = y.T
        ordering = _ordering(x, time, [rows[event[rows] == seen] for rows in sites for seen in (0, 1)])
        _warn(data, ordering, whose, f"gives the order of the times of the training rows; {remedy}")
        separating = [k for k in _separating(x, event.long(), sites) if k not in ordering]
        _warn(data, separating, whose, f"gives the event of all training rows; {remedy}")


def _warn(data: Dataset, features: Sequence[int], whose: str, what: str) -> None:
    if features:
        width = data.train_x.shape[1]
        has_names = len(data.meaning) > width and data.meaning[width] == "->"
        which = enumerated([data.meaning[k] if has_names else str(k) for k in features], "feature")
        warnings.warn(f"data{whose}: {which} alone {what}", stacklevel=3)


def _separating(x: Tensor, y: Tensor, sites: Sequence[Tensor]) -> list[int]:
    """Return the columns of x (n, f) that separate the classes y (n,) of every site, unless any would by chance."""
    groups = [rows for rows in sites if len(y[rows].unique()) > 1]
    log_chance = sum(_log_chance(y[rows]) + math.lgamma(len(y[rows].unique()) + 1) for rows in groups)
    return _matching(x, y, groups, _separates) if log_chance + math.log(x.shape[1]) < math.log(CHANCE) else []


def _ordering(x: Tensor, time: Tensor, groups: Sequence[Tensor]) -> list[int]:
    """Return the columns of x (n, f) that order the times (n,) of every group, up or down, and hardly by chance."""
    groups = [rows for rows in groups if len(rows) > 1]
    log_chance = torch.zeros(x.shape[1])
    ordering = _matching(x, time, groups, _orders)
    for k in ordering:
        for rows in groups:
            with_ties = _log_chance(time[rows]) + _log_chance(x[rows, k]) + math.lgamma(len(rows) + 1)
            log_chance[k] += min(with_ties + math.log(2), 0)
    return [k for k in ordering if log_chance[k] + math.log(x.shape[1]) < math.log(CHANCE)]


def _matching(x: Tensor, y: Tensor, groups: Sequence[Tensor], test: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """Return the columns of x (n, f) for which `test` is true of every group of rows."""
    columns = torch.arange(x.shape[1])
    for rows in groups:
        for some in (rows[:: max(len(rows) // 2000, 1)], rows):  # few rows exclude most columns, and are fast
            columns = columns[test(x[some[:, None], columns], y[some])] if len(columns) else columns
    return [int(k) for k in columns]


def _log_chance(values: Tensor) -> float:
    """Return the log of the probability prod_v m_v! / n! that n rows at random have these values in this order."""
    counts = values.unique(return_counts=True)[1].double()
    return float(torch.lgamma(counts + 1).sum()) - math.lgamma(len(values) + 1)


def _separates(x: Tensor, y: Tensor) -> Tensor:
    """(f,) bool: whether the values of the classes in y (n,) lie in disjoint intervals, for each column of x (n, f)."""
    low, high = _ranges(x, y)
    order = low.argsort(0)
    return (high.gather(0, order)[:-1] < low.gather(0, order)[1:]).all(0)


def _orders(x: Tensor, time: Tensor) -> Tensor:
    """(f,) bool: whether a later time (n,) never has less, or never more, of each column of x (n, f)."""
    low, high = _ranges(x, time)
    return (high[:-1] <= low[1:]).all(0) | (low[:-1] >= high[1:]).all(0)


def _ranges(x: Tensor, y: Tensor) -> list[Tensor]:
    """The least and the largest value, (values, f) each, of each column of x (n, f) by the values of y (n,)."""
    values, member = y.unique(return_inverse=True)
    place, out = member[:, None].expand_as(x), x.new_zeros(len(values), x.shape[1])
    return [out.scatter_reduce(0, place, x, how, include_self=False) for how in ("amin", "amax")]
