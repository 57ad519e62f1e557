"""Any table, CSV or Parquet, with a column of labels and perhaps one of sites."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_of_row_numbers
from fedmpi.data.sources.common import (
    check_groups,
    checked_fraction,
    find,
    gaps_allowed,
    number_groups,
    warn_of_divided_groups,
)
from fedmpi.data.sources.tables.files import Table, ordered, read
from fedmpi.data.sources.tables.missing import Value, missing_by_column, warn_of_no_value, with_gaps, without_gaps
from fedmpi.data.sources.tables.numerals import spelling
from fedmpi.data.sources.tables.preparation import Column, Fit, TablePreparation, fit_preparation
from fedmpi.data.sources.tables.sites import check_sites, row_owners, training_rows
from fedmpi.data.sources.tables.targets import Target, targets, with_events

Name = Annotated[str, Field(min_length=1)]


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
    event_words: dict[Value, Literal[0, 1]] | None = None,
    missing: Literal["refuse", "impute", "drop"] = "refuse",
    missing_values: Annotated[list[Value], Field(min_length=1)] | dict[str, list[Value]] | None = None,
    standardise: Literal["site", "pooled", "none"] = "site",
    global_test: Literal["site", "pooled"] = "site",
    small_sites: Literal["refuse", "keep", "drop"] = "refuse",
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
    decimal: Literal[".", ","] = ".",
    thousands: Literal[",", ".", "'", " "] | None = None,
) -> Dataset:
    """A CSV or Parquet file, root/path, whose first line names the columns; a silo is a file of its own.

    label_column: the column to be learned; several columns are one target (n, k), such as event
    and time for the task survival; with target: number a model has an output for each of them. site_column says whose
    a row is. split_column says train or test (val joins train); without it, test_fraction (0.2) of each class of each
    site is the test part, the same for every seed. group_column: whose rows stay together, such as patients': in
    the test part, the training part or what data.validation puts aside. features: the columns to learn from, in order;
    without it all others but those in `drop`, and but the index of a pandas table.
    categorical: columns of words, each value in the training part a column of 0 and 1; a mapping gives the values.
    target: class, number (a regression), or auto: class if the labels are words or whole numbers. class_names: the
    labels in the order of their numbers, else sorted. event_words: of event and time the words of the event, such as
    {dead: 1, alive: 0}.
    missing: a row with a gap is refused, dropped, or filled with the median (words: the most frequent) of its site's
    training part; missing_values: what is a gap, too, such as [-9, unknown], in all columns, or by column.
    standardise: numbers by mean and deviation of the training part of their own site, of all sites, or
    not; global_test: those of the global test set, which is pooled, too, where standardise is.
    small_sites: with one training row, or one class; refused, kept, or dropped. delimiter: between a CSV's cells;
    decimal: between the digits of its numbers; thousands: what separates groups of three of them, as in 27,822.

    In silo mode a site is prepared from its own rows alone: path may hold {site}, which becomes the silo's name, and
    without path the silo's name is the file's.
    """
    if site is not None:
        _check_silo(path, site_column, "pooled" in (standardise, global_test), small_sites)
    elif path is None:
        raise UserError("table: data.path is missing; it names the file, relative to data.root")
    if standardise == "none" and global_test == "pooled":
        raise UserError(
            "table: data.global_test: pooled changes nothing with data.standardise: none; leave one of them out"
        )
    if thousands == decimal:
        raise UserError(f"table: data.thousands and data.decimal are both {decimal!r}; they must differ")
    test_fraction = checked_fraction(test_fraction, f"data.split_column: {split_column}" if split_column else "")
    file = find(
        root, ((path or "{site}").replace("{site}", site or "{site}"),), "table", "correct data.root or data.path"
    )
    rows = read(file, delimiter, decimal, thousands)
    labels = [label_column] if isinstance(label_column, str) else label_column
    others = {"site_column": site_column, "split_column": split_column, "group_column": group_column}
    named = {"label_column": labels, **{key: [name] if name else [] for key, name in others.items()}}
    features = _features(rows, features, drop or (), named)
    values = _values(categorical, features)
    numeric = [name for name in features if name not in values]
    gap_words = missing_by_column(missing_values)
    events: dict[str, int] = {spelling(word): event for word, event in (event_words or {}).items()}

    no_gaps = {name: frozenset(words) for name, words in values.items() if words is not None}
    rows = replace(rows, named={**no_gaps, labels[0]: frozenset(map(spelling, class_names or ()))})
    rows = with_gaps(rows, gap_words)
    if events:
        _check_events(labels, events)
        rows = with_events(rows, labels[0], events)
    gaps_stay = gaps_allowed() and class_names is None and target != "class"
    needed = {**named, "label_column": []} if gaps_stay else named
    rows = without_gaps(rows, values, features, missing, needed, small_sites)

    aim = targets(rows, labels, target, class_names)
    owner, names = row_owners(rows, site_column, site)
    groups = rows.words(group_column, "group_column") if group_column else np.zeros(0, dtype=str)
    if split_column is None:
        warn_of_divided_groups(groups, [names[k] for k in owner] if names else ())
    train = training_rows(rows, split_column, groups, owner, aim, test_fraction)
    if split_column is not None:
        check_groups(groups, train, rows.at, f"{group_column}")  # of all sites: a patient of two is one patient
    keep, owner, names = check_sites(rows, aim, owner, names, train, small_sites, site is not None)
    rows, aim, train = rows.keep(keep), aim.keep(keep), train[keep]
    numbers = ((name, rows.numbers(name, "features")) for name in numeric)
    warn_of_row_numbers(file, numbers, owner)
    plain = TablePreparation(
        columns=_columns(rows, features, values, train),
        sites=dict.fromkeys(names or [""], Fit((), None)),
        labels=tuple(labels),
        class_names=aim.names,
        missing=missing,
        site_column=site_column,
        delimiter=delimiter,
        decimal=decimal,
        thousands=thousands,
        missing_values=gap_words,
        event_words=events,
    )
    data = _dataset(rows, aim, owner, names, train, plain, standardise, global_test)
    return replace(data, group=number_groups(groups[keep][train])) if group_column else data


def _check_silo(path: str | None, site_column: str | None, pooled: bool, small_sites: str) -> None:
    """Refuse options that need the rows of all sites where a silo sees its own rows alone."""
    alone = "needs the rows of all sites, and a silo sees its own alone; leave it out"
    if site_column is not None:
        raise UserError(f"table: data.site_column: {site_column} {alone}: each silo is a file, and a site")
    if pooled:
        raise UserError(f"table: pooled, in data.standardise or data.global_test, {alone}")
    if small_sites == "drop":
        raise UserError(f"table: data.small_sites: drop {alone}, or say keep")
    if path is not None and "{site}" not in path:
        raise UserError(f"table: data.path: {path!r} would be one file for all silos; write {{site}} where they differ")


def _features(
    rows: Table, given: list[str] | None, drop: Sequence[str], named: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the columns to learn from. named: the columns that the config names for something else, by key."""
    for name in drop:
        rows.column(name, "drop")
        if name in (given or ()):
            raise UserError(f"table: data.drop names {name!r}, which data.features names, too; leave it out of one")
    if given is not None:
        twice = next((name for k, name in enumerate(given) if name in given[:k]), None)
        if twice is not None:
            raise UserError(f"table: data.features names {twice!r} twice; each column stands once")
        for name in given:
            rows.column(name, "features")
            if name in named["label_column"]:
                raise UserError(
                    f"table: data.features: {name} is the data.label_column, which is to be learned; leave it out"
                )
        return given
    left_out = {*drop, *(name for names in named.values() for name in names)}
    index = [name for name in rows.index if name not in left_out]
    if index:
        which = "the first column, which has no name," if index == [""] else f"column {', '.join(map(repr, index))}"
        remedy = "give it a name" if index == [""] else "name it in data.features"
        warnings.warn(
            f"{rows.path}: {which} is left out: pandas writes the numbers of the rows there (its index); {remedy} to "
            "learn from it",
            stacklevel=3,
        )
    return [name for name in rows.columns if name not in left_out and name not in index]


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


def _check_events(labels: Sequence[str], events: Mapping[str, int]) -> None:
    """Check that data.event_words goes with event and time, and has words for both events."""
    if len(labels) != 2:
        raise UserError("table: data.event_words goes with two label columns: data.label_column: [EVENT, TIME]")
    if {*events.values()} != {0, 1}:
        raise UserError("table: data.event_words needs a word with 1 (seen) and one with 0 (censored)")


def _columns(
    rows: Table,
    features: Iterable[str],
    values: Mapping[str, list[str] | None],
    train: np.ndarray,
) -> tuple[Column, ...]:
    """Return the columns to learn from; a categorical one with its values given, or those in the training part."""
    columns = []
    for name in features:
        words = values.get(name)
        if name in values and words is None:
            words = ordered(list(rows.words(name, "categorical")[train]))
        columns.append(Column(name, None if words is None else tuple(words), closed=values.get(name) is not None))
    return tuple(columns)


def _dataset(
    rows: Table,
    aim: Target,
    owner: np.ndarray,
    names: Sequence[str],
    train: np.ndarray,
    plain: TablePreparation,
    standardise: str,
    global_test: str,
) -> Dataset:
    """Prepare the rows, in the order of the file."""
    if not plain.columns:
        raise UserError(f"{rows.path}: no column is left to learn from; correct data.features or data.drop")
    pooled = global_test == "pooled" and standardise == "site"
    preparation = fit_preparation(plain, rows, owner, train, standardise, pooled)
    if plain.missing == "impute":
        _warn_of_empty_columns(rows, preparation, names or [""], standardise)
    place = owner if len(preparation.sites) > 1 else np.zeros_like(owner)
    first, last = np.flatnonzero(train), np.flatnonzero(~train)
    train_x, test_x = (preparation.inputs(rows, place, part) for part in (first, last))
    for part, x in ((first, train_x), (last, test_x)) if standardise == "none" else ():
        if bool(x.isnan().any()):
            k, column = x.isnan().nonzero()[0].tolist()
            whose = f"site {names[owner[part[k]]]}" if names else "the table"
            what = f"column {preparation.meaning[column]!r} is empty, and in all of the training rows of {whose}"
            remedy = "put it into data.drop, or let data.standardise make it 0"
            raise UserError(f"{rows.at(int(part[k]))}: {what}; {remedy}")
    site = torch.from_numpy(owner) if names else None
    return Dataset(
        *(train_x, aim.y[first], test_x, aim.y[last], len(aim.names) or aim.outputs),
        site=None if site is None else site[first],
        test_site=None if site is None else site[last],
        site_names=tuple(names),
        global_x=preparation.inputs(rows, place, last, pooled=True) if pooled else None,
        meaning=(*preparation.meaning, "->", *aim.names),
        preparation=preparation,
    )


def _warn_of_empty_columns(rows: Table, preparation: TablePreparation, names: Sequence[str], standardise: str) -> None:
    """Warn of columns that have no value at a site. Of numbers that are not standardised that is refused elsewhere."""
    fits = [preparation.sites.get(name) or preparation.sites[""] for name in names]
    for at, column in enumerate(preparation.columns):
        if column.values is not None or standardise != "none":
            empty_at = [name for name, fit in zip(names, fits, strict=True) if fit.fill[at] is None]
            warn_of_no_value(rows, column.name, empty_at)
