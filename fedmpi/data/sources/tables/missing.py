"""Cells of a table that say nothing: what becomes of their rows, and what is said of it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, shorten
from fedmpi.data.csv_file import text_of
from fedmpi.data.sources.tables.files import Table, ordered


def without_gaps(
    rows: Table,
    categorical: Collection[str],
    features: Sequence[str],
    missing: str,
    named: Mapping[str, Sequence[str]],
    small_sites: str,
) -> Table:
    """The table, without rows that have a gap where `missing` is drop; a gap that nothing fills is refused.

    named: the columns that are no features, by the key of the config that names them. A site that has no row left is
    refused, unless small_sites drops it.
    """
    keys = dict.fromkeys(features, "features")
    for key, given in named.items():
        keys |= dict.fromkeys(given, key)
    holes = {name: rows.gaps(name, key) for name, key in keys.items()}
    if missing == "refuse":
        _refuse(rows, keys, holes)
        return rows
    labels = named["label_column"] if len(named["label_column"]) == 1 else ()
    for name, key in [
        *dict.fromkeys(categorical, "categorical").items(),
        *dict.fromkeys(labels, "class_names").items(),
    ]:
        _tell_none(rows, name, key, holes[name])
    if missing == "impute":
        _refuse(rows, {name: key for name, key in keys.items() if name not in features}, holes)
        return rows
    whole = ~np.any(list(holes.values()), axis=0)
    worst = sorted(holes, key=lambda name: -holes[name].sum())
    if not whole.any():
        raise UserError(f"{rows.path}: every row has a gap, most of them in column {worst[0]!r}; put it into data.drop")
    left = rows.keep(np.flatnonzero(whole))
    if not whole.all():
        where = ", ".join(f"{name!r} {holes[name].sum()}" for name in worst[:3] if holes[name].any())
        lost = f"data.missing: drop leaves out {(~whole).sum()} of {count(len(rows), 'row')} of {rows.path}"
        warnings.warn(f"{lost}; most gaps: {where}", stacklevel=4)
    if named["site_column"] and small_sites != "drop":
        _check_left(rows, left, named["site_column"][0], holes)
    return left


def tell_empty(rows: Table, name: str, sites: Sequence[str]) -> None:
    """A column of which a site has no value is a constant there: nothing is learned from it, and it looks like data.

    sites: the names of such sites; "" is the whole table.
    """
    if sites:
        whose = "of the table" if "" in sites else f"of {', '.join(sites)}"
        warnings.warn(
            f"{rows.path}: column {name!r} has no value in any training row {whose}; it is 0 there", stacklevel=2
        )


def _refuse(rows: Table, keys: Mapping[str, str], holes: Mapping[str, np.ndarray]) -> None:
    labels = [name for name, key in keys.items() if key == "label_column"]
    for name, key in keys.items():
        if holes[name].any():
            row = int(holes[name].argmax())
            cells = rows.columns[name]
            word = text_of(cells[[row]])[0].strip() if cells.dtype != np.float64 else ""
            is_empty = f"is empty (it holds {word!r}, which is read as a gap)" if word else "is empty"
            is_empty += " (or holds one of data.missing_values)" if rows.coded and not word else ""
            remedy = "say data.missing: impute or drop" if key == "features" else "say data.missing: drop"
            if key == "label_column" and len(labels) > 1:
                remedy += "; or task.ignore: nan, if labels that are not known are to be left out of loss and metrics"
            if word.casefold() == "none" and key in ("features", "label_column"):
                where = "categorical" if key == "features" else "class_names"
                remedy += f"; or, if it is a value, name it in data.{where}"
            raise UserError(f"{rows.at(row)}: column {name!r} {is_empty}; fill it, or {remedy}")


def _tell_none(rows: Table, name: str, key: str, holes: np.ndarray) -> None:
    """Among words "none" may be one of them, which the config can say."""
    cells = rows.columns[name][holes]
    words = text_of(cells) if cells.dtype != np.float64 else ()
    many = sum(cell.strip().casefold() == "none" for cell in words)
    if many:
        what = f"{rows.path}: {count(many, 'cell')} of column {name!r} with the word none are read as gaps"
        warnings.warn(f"{what}; if it is a value there, name it in data.{key}", stacklevel=5)


def _check_left(rows: Table, left: Table, column: str, holes: Mapping[str, np.ndarray]) -> None:
    before, after = (ordered(list(table.words(column, "site_column"))) for table in (rows, left))
    lost = [name for name in before if name not in after]
    if lost:
        mine = rows.words(column, "site_column") == lost[0]
        worst = max(holes, key=lambda name: holes[name][mine].sum())
        raise UserError(
            f"{rows.path}: data.missing: drop leaves no row of site {shorten(', '.join(map(repr, lost)))}, most gaps "
            f"are in column {worst!r}; put it into data.drop, or say data.small_sites: drop"
        )
