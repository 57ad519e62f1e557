"""Columns that number the rows of a table: what a model learns from them is the order of the file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedmpi.common.text import enumerated

FEW = 20  # rows, of which fewer say nothing


def numbers_rows(x: np.ndarray) -> bool:
    """Whether the values (n,) number the rows.

    They do if they rise or fall by a constant step, if they are whole numbers that all rise or all fall, or a
    permutation of consecutive whole numbers.
    """
    if len(x) < FEW or not np.isfinite(x).all():
        return False
    step = np.diff(x)
    if bool((step == step[0]).all()) and step[0] != 0:
        return True
    if not np.array_equal(x, np.floor(x)):
        return False
    if bool((step > 0).all() or (step < 0).all()):
        return True
    return bool(x.max() - x.min() == len(x) - 1) and len(np.unique(x)) == len(x)


def numbering(columns: Iterable[tuple[str, np.ndarray]], owner: np.ndarray) -> list[str]:
    """The names of the columns (n,) that number all rows, or those of each site.

    Args:
        columns: numeric features with their names.
        owner: (n,) the number of the site of each row.
    """
    order, last = np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1]
    found = []
    for name, x in columns:
        sites = [part for part in np.split(x[order], last) if len(part) >= FEW]
        if numbers_rows(x) or (sites and all(map(numbers_rows, sites))):
            found.append(name)
    return found


def warn_of_row_numbers(path: Path, names: Sequence[str]) -> None:
    """Warn once of all columns of a file that number its rows, by their names, if there are any."""
    if names:
        number, them, are = ("number", "them", "they are") if len(names) > 1 else ("numbers", "it", "it is")
        warnings.warn(
            f"{path}: {enumerated(names, 'column')} {number} the rows; a model that learns from {them} learns the "
            f"order of the file: leave {them} out, unless {are} measured",
            stacklevel=3,
        )


def may_number_rows(x: np.ndarray, owner: np.ndarray) -> bool:
    """Whether some values (m,) of a column, of the sites owner (m,), leave it open that all of them number the rows."""
    step = np.diff(x)
    if not np.isfinite(x).all() or not (np.array_equal(x, np.floor(x)) or bool((step == step[:1]).all())):
        return False
    return len(np.unique(np.stack([owner, x]), axis=1).T) == len(x)
