"""Warnings about columns that silently mean something else than their author thinks."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedmpi.common.text import count, enumerated, near_duplicates, shorten
from fedmpi.data.leaks import CHANCE
from fedmpi.data.sources.tables.files import FEW, Table, names_rows
from fedmpi.data.sources.tables.preparation import TablePreparation


def numbers_rows(x: np.ndarray) -> bool:
    """Return whether the values (n,) number the rows.

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


def columns_that_number_rows(columns: Iterable[tuple[str, np.ndarray]], owner: np.ndarray) -> list[str]:
    """Return the names of the columns (n,) that number all rows, or those of each site.

    owner: (n,) the number of the site of each row.
    """
    order, last = np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1]
    names = []
    for name, x in columns:
        sites = [part for part in np.split(x[order], last) if len(part) >= FEW]
        if numbers_rows(x) or (sites and all(map(numbers_rows, sites))):
            names.append(name)
    return names


def warn_of_row_numbers(path: Path, names: Sequence[str]) -> None:
    """Warn once of the columns that number the rows of a file: a model that learns from them learns its order."""
    if names:
        number, them, are = ("number", "them", "they are") if len(names) > 1 else ("numbers", "it", "it is")
        warnings.warn(
            f"{path}: {enumerated(names, 'column')} {number} the rows; a model that learns from {them} learns the "
            f"order of the file: leave {them} out, unless {are} measured",
            stacklevel=3,
        )


def warn_of_coded_gaps(rows: Table, names: Sequence[str]) -> None:
    """Warn of columns of numbers in which one negative whole number stands in several rows, and no other does.

    Columns of -1, 0 and 1 alone are not meant. names: the columns that hold numbers.
    """
    for name in names:
        cells = rows.columns[name]
        if cells.dtype == np.float64:
            negative = cells < 0
        elif cells.dtype == object:
            negative = np.array([cell.lstrip().startswith("-") for cell in cells.tolist()], dtype=bool)
        else:
            negative = np.char.startswith(cells, b"-")
        if not 1 < negative.sum() < len(rows):
            continue
        few = rows.keep(np.flatnonzero(negative)).words(name, "features").tolist()
        if len({*few}) > 1 or few[0] == "-0" or re.fullmatch("-[0-9]+", few[0]) is None:
            continue
        if few[0] == "-1" and {*rows.words(name, "features")} <= {"", "-1", "0", "1"}:
            continue
        warnings.warn(
            f"{rows.path}: column {name!r} holds {few[0]} in {count(len(few), 'row')}, and no other negative number; "
            f'if it stands for a value that is not known, say data.missing_values: {{{name}: ["{few[0]}"]}}',
            stacklevel=3,
        )


def warn_of_words(rows: Table, name: str, values: Sequence[str], owner: np.ndarray, train: np.ndarray) -> None:
    """Warn of a column of words that name the rows, or of which two may be one.

    Args:
        values: the words of the training rows, which the config does not name.
        owner: (n,) the number of the site of each row.
        train: (n,) whether a row is for training.
    """
    column = f"{rows.path}: column {name!r} (data.categorical)"
    if names_rows(len(values), int(train.sum())):
        warnings.warn(
            f"{column} has {count(len(values), 'value')} in {train.sum()} training rows: it names the rows, and what "
            "is learned of one does not hold for others; list it in data.drop instead",
            stacklevel=4,
        )
        return
    words = rows.words(name, "categorical")
    remedy = "correct the file, and name the values, so that another one is refused: data.categorical: "
    twice = near_duplicates(values)
    if twice:
        places = [rows.at(int(np.flatnonzero(words == word)[0])) for word in twice]
        both = f"{twice[0]!r} ({places[0]}) and {twice[1]!r} ({places[1]})"
        warnings.warn(
            f"{column} holds {both}, which are two values; if they are one, {remedy}{{{name}: [...]}}", stacklevel=4
        )
    lonely = [word for word in values if _at_one_site(owner[train & (words == word)], owner[train])]
    if lonely:
        occur = f"{shorten(', '.join(map(repr, lonely)), 100)} {'occur' if len(lonely) > 1 else 'occurs'}"
        warnings.warn(
            f"{column}: {occur} at one site only; if a site spells values in its own way, {remedy}{{{name}: [...]}}",
            stacklevel=4,
        )


def _at_one_site(own: np.ndarray, owner: np.ndarray) -> bool:
    """Return whether rows of the sites `own` (m,) are of one site, and rows drawn from all, of the sites `owner` (n,),
    would hardly be."""
    share = float((owner == own[0]).mean()) if len(own) and (own == own[0]).all() else 1.0
    return len(own) * math.log(share) < math.log(CHANCE)


def warn_of_constants(rows: Table, inputs: Tensor, preparation: TablePreparation) -> None:
    """Warn once of columns that have one value in all training rows, or, standardised by site, one at each site.

    inputs: (n, f) of the training rows. Columns without any value are warned of elsewhere.
    """
    if len(inputs) < 2:
        return
    same, end, names = (inputs == inputs[0]).all(0), 0, []
    for at, column in enumerate(preparation.columns):
        begin, end = end, end + (1 if column.values is None else len(column.values))
        is_empty = preparation.missing == "impute" and all(fit.fill[at] is None for fit in preparation.sites.values())
        if end > begin and not is_empty and bool(same[begin:end].all()):
            names.append(column.name)
    if names:
        them = "them" if len(names) > 1 else "it"
        warnings.warn(
            f"{rows.path}: {enumerated(names, 'column')} has the same value in all training rows; nothing can be "
            f"learned from {them}: list {them} in data.drop",
            stacklevel=4,
        )
