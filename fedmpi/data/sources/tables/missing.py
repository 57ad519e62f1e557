"""Cells of a table without a value: which they are, what becomes of their rows, and the messages about them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, shorten
from fedmpi.data.csv_file import text_of
from fedmpi.data.sources.tables import numerals
from fedmpi.data.sources.tables.files import Table, ordered

Value = str | int | float
EVERY = ""  # the column's name under which values of all columns stand


def missing_by_column(given: Sequence[Value] | Mapping[str, Sequence[Value]] | None) -> dict[str, tuple[str, ...]]:
    """Return data.missing_values by column, in one spelling; a list is for all columns, under EVERY."""
    by_column = given if isinstance(given, Mapping) else {EVERY: given or ()}
    return {name: tuple(map(numerals.spelling, values)) for name, values in by_column.items() if values}


def with_gaps(rows: Table, missing: Mapping[str, Sequence[str]]) -> Table:
    """Return the table with a gap for each value that `missing` lists, unless the column names it as a value."""
    for name in missing:
        if name != EVERY:
            rows.column(name, "missing_values")
    columns = dict(rows.columns)
    for name, cells in rows.columns.items():
        words = {*missing.get(EVERY, ()), *missing.get(name, ())} - {*rows.named.get(name, ())}
        if words and cells.dtype == np.float64:
            numbers = [float(word) for word in words if numerals.is_number(word)]
            columns[name] = np.where(np.isin(cells, numbers), np.nan, cells)
        elif words:
            different = np.array(list({*cells.tolist()}), dtype=cells.dtype)
            plain = [numerals.plain(text, rows.decimal, rows.thousands) for text in text_of(different)]
            coded = different[[numerals.spelling(cell) in words for cell in plain]]
            empty = "" if cells.dtype == object else b""
            columns[name] = np.where(np.isin(cells, coded), empty, cells) if len(coded) else cells
    return replace(rows, columns=columns, coded=bool(missing))


def without_gaps(
    rows: Table,
    categorical: Collection[str],
    features: Sequence[str],
    missing: str,
    named: Mapping[str, Sequence[str]],
    small_sites: str,
) -> Table:
    """Refuse gaps that nothing fills, or where `missing` is drop, return the table without their rows.

    named: the columns that are no features, by the key of the config that names them. A site that has no row left is
    refused, unless small_sites drops it.
    """
    keys = dict.fromkeys(features, "features")
    for key, given in named.items():
        keys |= dict.fromkeys(given, key)
    gaps = {name: rows.gaps(name, key) for name, key in keys.items()}
    if missing == "refuse":
        _refuse(rows, keys, gaps)
        return rows
    for name in categorical:
        _warn_of_none(rows, name, "categorical", gaps[name])
    if len(named["label_column"]) == 1:
        label = named["label_column"][0]
        _warn_of_none(rows, label, "class_names", gaps[label])
    if missing == "impute":
        _refuse(rows, {name: key for name, key in keys.items() if name not in features}, gaps)
        return rows
    complete = ~np.any(list(gaps.values()), axis=0)
    worst = sorted(gaps, key=lambda name: -gaps[name].sum())
    if not complete.any():
        raise UserError(f"{rows.path}: every row has a gap, most of them in column {worst[0]!r}; put it into data.drop")
    left = rows.keep(np.flatnonzero(complete))
    if not complete.all():
        where = ", ".join(f"{name!r} {gaps[name].sum()}" for name in worst[:3] if gaps[name].any())
        lost = f"data.missing: drop leaves out {(~complete).sum()} of {count(len(rows), 'row')} of {rows.path}"
        warnings.warn(f"{lost}; most gaps: {where}", stacklevel=4)
    if named["site_column"] and small_sites != "drop":
        _check_sites_left(rows, left, named["site_column"][0], gaps)
    return left


def warn_of_no_value(rows: Table, name: str, sites: Sequence[str]) -> None:
    """Warn of a column that has no value at these sites, where it is a constant; "" stands for the whole table."""
    if sites:
        where = "of the table" if "" in sites else f"of {', '.join(sites)}"
        warnings.warn(
            f"{rows.path}: column {name!r} has no value in any training row {where}; it is 0 there", stacklevel=2
        )


def _refuse(rows: Table, keys: Mapping[str, str], gaps: Mapping[str, np.ndarray]) -> None:
    labels = [name for name, key in keys.items() if key == "label_column"]
    for name, key in keys.items():
        if gaps[name].any():
            row = int(gaps[name].argmax())
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


def _warn_of_none(rows: Table, name: str, key: str, gaps: np.ndarray) -> None:
    """Warn of gaps with the word none, which the config can make a value."""
    cells = rows.columns[name][gaps]
    words = text_of(cells) if cells.dtype != np.float64 else ()
    number = sum(cell.strip().casefold() == "none" for cell in words)
    if number:
        cells_with_none = f"{rows.path}: {count(number, 'cell')} of column {name!r} with the word none are read as gaps"
        warnings.warn(f"{cells_with_none}; if it is a value there, name it in data.{key}", stacklevel=5)


def _check_sites_left(rows: Table, left: Table, column: str, gaps: Mapping[str, np.ndarray]) -> None:
    before, after = (ordered(list(table.words(column, "site_column"))) for table in (rows, left))
    lost = [name for name in before if name not in after]
    if lost:
        own = rows.words(column, "site_column") == lost[0]
        worst = max(gaps, key=lambda name: gaps[name][own].sum())
        raise UserError(
            f"{rows.path}: data.missing: drop leaves no row of site {shorten(', '.join(map(repr, lost)))}, most gaps "
            f"are in column {worst!r}; put it into data.drop, or say data.small_sites: drop"
        )
