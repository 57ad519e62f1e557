"""Any table, CSV or Parquet, with a column of labels and perhaps one of sites."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import (
    PARTS,
    check_groups,
    checked_fraction,
    file_name,
    find,
    gaps_allowed,
    holdout,
    number_groups,
)
from fedmpi.data.sources.tables.files import Table, Target, ordered, read, spelling, targets
from fedmpi.data.sources.tables.preparation import Column, Fit, TablePreparation, fit_preparation

Name = Annotated[str, Field(min_length=1)]
Value = str | int | float


def table(
    root: Path,
    *,
    site: str | None = None,
    path: str | None = None,
    label_column: Name | Annotated[list[Name], Field(min_length=1)] = "label",
    site_column: Name | None = None,
    split_column: Name | None = None,
    group_column: Name | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    features: Annotated[list[str], Field(min_length=1)] | None = None,
    drop: list[str] | None = None,
    categorical: list[str] | dict[str, Annotated[list[Value], Field(min_length=1)]] | None = None,
    target: Literal["auto", "class", "number"] = "auto",
    class_names: Annotated[list[Value], Field(min_length=2)] | None = None,
    missing: Literal["refuse", "impute", "drop"] = "refuse",
    missing_values: Annotated[list[Value], Field(min_length=1)] | dict[str, list[Value]] | None = None,
    standardise: Literal["site", "pooled", "none"] = "site",
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
    decimal: Literal[".", ","] = ".",
) -> Dataset:
    """A CSV or Parquet file, root/path, whose first line names the columns; a silo is a file of its own.

    label_column: the column to be learned; several columns are one target (n, k), such as event
    and time for the task survival; with target: number a model has an output for each of them. site_column says whose
    a row is. split_column says train or test (val joins train); without it, test_fraction (0.2) of each class of each
    site is the test part, the same for every seed. group_column: whose rows stay together, such as patients': in
    the test part, the training part or what data.validation puts aside. features: the columns to learn from, in order;
    without it all others but those in `drop`.
    categorical: columns of words, each value in the training part a column of 0 and 1; a mapping gives the values.
    target: class, number (a regression), or auto: class if the labels are words or whole numbers. class_names: the
    labels in the order of their numbers, else sorted.
    missing: a row with a gap is refused, dropped, or filled with the median (words: the most frequent) of its site's
    training part; missing_values: what is a gap, too, such as [-9, unknown], in all columns, or by column.
    standardise: numbers by mean and deviation of the training part of their own site, of all sites, or
    not.
    delimiter: between a CSV's cells; decimal: between the digits of its numbers.

    In silo mode a site is prepared from its own rows alone: path may hold {site}, which becomes the silo's name, and
    without path the silo's name is the file's.
    """
    for key, value in {"site_column": site_column, "standardise": standardise}.items():
        if site is not None and (value == "pooled" or (value and key == "site_column")):
            raise UserError(
                f"table: data.{key}: {value} needs the rows of all sites, and a silo sees its own alone; leave it out"
            )
    test_fraction = checked_fraction(test_fraction, f"data.split_column: {split_column}" if split_column else "")
    file = find(root, (file_name("table", site, path),), "table", "correct data.root or data.path")
    rows = read(file, delimiter, decimal)
    labels = [label_column] if isinstance(label_column, str) else label_column
    others = {"site_column": site_column, "split_column": split_column, "group_column": group_column}
    keys = dict.fromkeys(labels, "label_column") | {name: key for key, name in others.items() if name}
    features = _features(rows, features, drop or (), keys)
    if not features:
        raise UserError(f"{file}: no column is left to learn from; correct data.features or data.drop")
    values = _values(categorical, features)
    by_column = missing_values if isinstance(missing_values, dict) else {"": missing_values or []}
    for name in by_column:
        if name:
            rows.column(name, "missing_values")
    gap_words = {name: tuple(map(spelling, words)) for name, words in by_column.items() if words}
    named = {name: words for name, words in values.items() if words is not None}
    rows = replace(rows, named=named | {labels[0]: list(map(spelling, class_names or ()))}, missing=gap_words)
    numeric = [name for name in features if name not in values]
    rows = rows.parsed(numeric, "features")
    gaps_stay = gaps_allowed() and class_names is None and target != "class"
    keys = {name: key for name, key in keys.items() if key != "label_column" or not gaps_stay}
    rows = _without_gaps(rows, dict.fromkeys(features, "features") | keys, missing)

    aim = targets(rows, labels, target, class_names)
    owner, names = rows.owners(site_column)
    names = [site] if site else names
    groups = rows.words(group_column, "group_column") if group_column else np.zeros(0, dtype=str)
    train = _training_rows(rows, aim, owner, names, groups, split_column, test_fraction)
    plain = TablePreparation(
        columns=tuple(_column(rows, name, values, train) for name in features),
        sites=dict.fromkeys(names or [""], Fit(())),
        labels=tuple(labels),
        class_names=aim.names,
        missing=missing,
        site_column=site_column,
        delimiter=delimiter,
        decimal=decimal,
        missing_values=gap_words,
    )
    preparation = fit_preparation(plain, rows, owner, train, standardise)
    x = preparation.inputs(rows, owner if len(preparation.sites) > 1 else np.zeros_like(owner))
    first, last = torch.from_numpy(train), torch.from_numpy(~train)
    site_of = torch.from_numpy(owner) if names else None
    return Dataset(
        *(x[first], aim.y[first], x[last], aim.y[last], len(aim.names) or aim.outputs),
        site=None if site_of is None else site_of[first],
        test_site=None if site_of is None else site_of[last],
        site_names=tuple(names),
        meaning=(*preparation.meaning, "->", *aim.names),
        group=number_groups(groups[train]) if group_column else None,
        preparation=preparation,
    )


def _features(rows: Table, given: list[str] | None, drop: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """Return the columns to learn from. keys: of the columns that the config names for something else."""
    for name, key in {**dict.fromkeys(drop, "drop"), **keys}.items():
        rows.column(name, key)
    if given is not None:
        labels = [name for name, key in keys.items() if key == "label_column"]
        for k, name in enumerate(given):
            rows.column(name, "features")
            if name in [*given[:k], *drop, *labels]:
                where = "names twice, or in data.drop or data.label_column, too"
                raise UserError(f"table: {name!r} is a column that data.features {where}; leave it out of one")
        return given
    return [name for name in rows.columns if name not in {*drop, *keys}]


def _values(
    categorical: list[str] | dict[str, list[Value]] | None, features: Sequence[str]
) -> dict[str, list[str] | None]:
    """Return the values of each column of words in one spelling; None where the training part gives them."""
    values: dict[str, list[str] | None] = dict.fromkeys(categorical or ())
    if isinstance(categorical, dict):
        values = {name: list(map(spelling, given)) for name, given in categorical.items()}
    for name, words in values.items():
        if name not in features:
            raise UserError(f"table: data.categorical names {name!r}, which is none of {', '.join(features)}")
        if words is not None and len(set(words)) < len(words):
            raise UserError(f"table: data.categorical.{name} holds a value twice: {', '.join(words)}")
    return values


def _column(rows: Table, name: str, values: Mapping[str, list[str] | None], train: np.ndarray) -> Column:
    """Return a column to learn from; a categorical one with its values given, or those in the training part."""
    words = values.get(name)
    if name in values and words is None:
        return Column(name, tuple(ordered(rows.words(name, "categorical")[train])))
    return Column(name, None if words is None else tuple(words), closed=words is not None)


def _without_gaps(rows: Table, keys: Mapping[str, str], missing: str) -> Table:
    """Refuse gaps that nothing fills, or where `missing` is drop, return the table without their rows.

    keys: of the config, by the columns that they name. A site that has no row left is refused.
    """
    gaps = {name: rows.gaps(name, key) for name, key in keys.items()}
    for name, key in keys.items():
        if gaps[name].any() and (missing == "refuse" or (missing == "impute" and key != "features")):
            row = int(gaps[name].argmax())
            remedy = "fill it, or say data.missing: impute or drop" if key == "features" else "say data.missing: drop"
            if key == "label_column":
                remedy += "; or task.ignore: nan, if labels that are not known are to be left out of loss and metrics"
            raise UserError(f"{rows.at(row)}: column {name!r} is empty; {remedy}")
    incomplete = np.any(list(gaps.values()), axis=0)
    if missing != "drop" or not incomplete.any():
        return rows
    worst = sorted(gaps, key=lambda name: -gaps[name].sum())
    most = ", ".join(f"{name!r} {gaps[name].sum()}" for name in worst[:3] if gaps[name].any())
    dropped = f"data.missing: drop leaves out {incomplete.sum()} of {count(len(rows), 'row')} of {rows.path}"
    if incomplete.all():
        raise UserError(f"{dropped}; most gaps: {most}; put these columns into data.drop")
    warnings.warn(f"{dropped}; most gaps: {most}", stacklevel=3)
    left = rows.keep(np.flatnonzero(~incomplete))
    site_column = next((name for name, key in keys.items() if key == "site_column"), None)
    lost = {*rows.owners(site_column)[1]} - {*left.owners(site_column)[1]}
    if lost:
        raise UserError(f"{dropped}, and leaves no row of site {min(lost)!r}; fill them, or leave the site out")
    return left


def _training_rows(
    rows: Table,
    aim: Target,
    owner: np.ndarray,
    names: Sequence[str],
    groups: np.ndarray,
    split_column: str | None,
    test_fraction: float,
) -> np.ndarray:
    """(n,) bool, whether a row is for training: by the column that says so, or drawn of each class of each site."""
    train = np.ones(len(rows), dtype=bool)
    if split_column is None:
        for own in (np.flatnonzero(owner == k) for k in np.unique(owner)):
            train[own[holdout(aim.strata[own], test_fraction, groups[own] if len(groups) else ())[1]]] = False
    else:
        words = [word.casefold() for word in rows.words(split_column, "split_column")]
        odd = next((row for row, word in enumerate(words) if word not in PARTS), None)
        if odd is not None:
            allowed = ", ".join(PARTS)
            raise UserError(f"{rows.at(odd)}: column {split_column!r} holds {words[odd]!r}; allowed: {allowed}")
        train = np.array([PARTS[word] != "test" for word in words], dtype=bool)
        check_groups(groups, train, rows.at)  # of all sites: a patient of two is one patient
    for k, name in enumerate(names):
        if not train[owner == k].any():
            place = rows.at(int(np.argmax(owner == k)))
            raise UserError(f"{place}: site {name!r}, which begins there, has no training row; leave the site out")
    return train
