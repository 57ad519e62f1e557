"""Any table, CSV or Parquet, with a column of labels and perhaps one of sites."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, near_duplicates
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import (
    check_groups,
    checked_fraction,
    find,
    gaps_allowed,
    holdout,
    numbered,
    tell_of_travellers,
)
from fedmpi.data.sources.tables.coded import (
    Value,
    missing_by_column,
    with_events,
    with_gaps,
)
from fedmpi.data.sources.tables.column_warnings import warn_of_coded_gaps, warn_of_constants, warn_of_words
from fedmpi.data.sources.tables.files import Table, ordered, read, spelling
from fedmpi.data.sources.tables.index import may_number_rows, numbering, warn_of_row_numbers
from fedmpi.data.sources.tables.missing import tell_empty, without_gaps
from fedmpi.data.sources.tables.preparation import Column, Fit, TablePreparation, fitted
from fedmpi.data.sources.tables.sites import check_sites
from fedmpi.data.sources.tables.targets import Target, targets

Name = Annotated[str, Field(min_length=1)]
PARTS = {"train": True, "test": False, "val": True, "valid": True, "validation": True}


@dataclass(frozen=True)
class Options:
    """How a table's columns are read; what `table` is told."""

    features: Sequence[str] | None
    categorical: dict[str, list[str] | None]
    missing: str
    standardise: str
    global_test: str


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
    file = (path or "{site}").replace("{site}", site or "{site}")
    at = find(root, (file,), "table", "correct data.root or data.path")
    rows = read(at, delimiter, decimal, thousands)
    named = {
        "label_column": [label_column] if isinstance(label_column, str) else label_column,
        "site_column": [site_column] if site_column else [],
        "split_column": [split_column] if split_column else [],
        "group_column": [group_column] if group_column else [],
    }
    features = _features(rows, features, drop or (), chain(*named.values()))
    again = next((name for name in named["label_column"] if name in features), None)
    if again is not None:
        raise UserError(f"table: data.features: {again} is the data.label_column, which is to be learned; leave it out")
    options = Options(features, _values(categorical, features), missing, standardise, global_test)
    said = {name: values for name, values in options.categorical.items() if values is not None}
    said |= {name: [spelling(value) for value in class_names or ()] for name in named["label_column"][:1]}
    rows = replace(rows, named={name: frozenset(values) for name, values in said.items()})
    _tell_twice(rows)
    gap_words = missing_by_column(missing_values)
    rows = with_gaps(rows, gap_words)
    events: dict[str, int] = {spelling(word): seen for word, seen in (event_words or {}).items()}
    if events:
        rows = with_events(rows, _event_column(named["label_column"], events), events)
    numeric = [name for name in features if name not in options.categorical]
    warn_of_coded_gaps(rows, numeric)
    gaps_stay = gaps_allowed() and class_names is None and target != "class"
    needed = {**named, "label_column": []} if gaps_stay else named
    rows = without_gaps(rows, options.categorical, features, missing, needed, small_sites)
    aim = targets(rows, named["label_column"], target, class_names)
    owner, names = _owners(rows, site_column, site)
    if split_column is None:
        tell_of_travellers(_groups(rows, group_column), [names[k] for k in owner] if names else ())
    train = _parts(rows, split_column, group_column, owner, aim, test_fraction)
    keep, owner, names = check_sites(rows, aim, owner, names, train, small_sites, site is not None)
    rows, aim, train = rows.keep(keep), aim.keep(keep), train[keep]
    warn_of_row_numbers(at, numbering(_may_number(numeric, rows, owner), owner))
    plain = TablePreparation(
        columns=_columns(rows, options, owner, train),
        sites=dict.fromkeys(names or [""], Fit((), None)),
        labels=tuple(named["label_column"]),
        class_names=aim.names,
        missing=missing,
        site_column=site_column,
        delimiter=delimiter,
        decimal=decimal,
        thousands=thousands,
        missing_values=gap_words,
        event_words=events,
    )
    found = _dataset(rows, aim, owner, names, train, plain, options)
    return replace(found, group=numbered(_groups(rows, group_column)[train])) if group_column else found


def _features(rows: Table, given: list[str] | None, drop: Sequence[str], taken: Iterable[str]) -> list[str]:
    """The columns to learn from. taken: those that say something else."""
    for name in drop:
        rows.column(name, "drop")
        if name in (given or ()):
            raise UserError(f"table: data.drop names {name!r}, which data.features names, too; leave it out of one")
    twice = next((name for k, name in enumerate(given or ()) if name in (given or ())[:k]), None)
    if twice is not None:
        raise UserError(f"table: data.features names {twice!r} twice; each column stands once")
    for name in given or ():
        rows.column(name, "features")
    if given is not None:
        return given
    left_out = {*taken, *drop}
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


def _event_column(labels: Sequence[str], events: Mapping[str, int]) -> str:
    """The column that holds the event; data.event_words names both of what it may say."""
    if len(labels) != 2:
        raise UserError("table: data.event_words goes with two label columns: data.label_column: [EVENT, TIME]")
    if {*events.values()} != {0, 1}:
        raise UserError("table: data.event_words needs a word with 1 (seen) and one with 0 (censored)")
    return labels[0]


def _tell_twice(rows: Table) -> None:
    """Tell of rows that are equal in every column: of two, one may be trained on and the other tested on."""
    key = np.zeros(len(rows), dtype=np.uint64)
    for name, cells in rows.columns.items():
        if name not in rows.index:
            _mix(key, cells)
    _, first, member = np.unique(key, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[member] != np.arange(len(rows)))
    if len(again):
        a, b = first[member[again[0]]], again[0]
        what = f"data: {count(len(again), 'row')} of {rows.path} equal to an earlier one in every column"
        where = f"the first of them {rows.unit} {rows.places[b]}, as {rows.unit} {rows.places[a]}"
        warnings.warn(f"{what}, {where}: one may be trained on, and the other be a test", stacklevel=3)


def _mix(key: np.ndarray, cells: np.ndarray) -> None:
    """Mix a column (n,) into the hashes (n,) of its rows, in place (FNV-1a, with 64 bits)."""
    if cells.dtype == object:
        words = [np.array([hash(cell) for cell in cells], dtype=np.int64).view(np.uint64)]
    elif cells.dtype == np.float64:
        words = [(cells + 0.0).view(np.uint64)]
    else:
        words = list(np.ascontiguousarray(cells).view(np.uint8).reshape(len(cells), -1).T)
    for word in words:
        key ^= word
        key *= np.uint64(0x100000001B3)
        key ^= key >> np.uint64(32)


def _check_silo(path: str | None, site_column: str | None, pooled: bool, small_sites: str) -> None:
    """What goes with one table of all sites goes not with silos, which see their own rows alone."""
    alone = "needs the rows of all sites, and a silo sees its own alone; leave it out"
    if site_column is not None:
        raise UserError(f"table: data.site_column: {site_column} {alone}: each silo is a file, and a site")
    if pooled:
        raise UserError(f"table: pooled, in data.standardise or data.global_test, {alone}")
    if small_sites == "drop":
        raise UserError(f"table: data.small_sites: drop {alone}, or say keep")
    if path is not None and "{site}" not in path:
        raise UserError(f"table: data.path: {path!r} would be one file for all silos; write {{site}} where they differ")


def _values(
    categorical: list[str] | dict[str, list[Value]] | None, features: Sequence[str]
) -> dict[str, list[str] | None]:
    """column -> its values in one spelling; None where the training part is to say them."""
    given = categorical or {}
    found: dict[str, list[str] | None] = dict.fromkeys(given)
    if isinstance(given, dict):
        found = {name: [spelling(value) for value in values] for name, values in given.items()}
    for name, values in found.items():
        if name not in features:
            raise UserError(f"table: data.categorical names {name!r}, which is none of {', '.join(features)}")
        if values is not None and len(set(values)) < len(values):
            raise UserError(f"table: data.categorical.{name} holds a value twice: {', '.join(values)}")
    return found


def _may_number(names: Sequence[str], rows: Table, owner: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The numeric columns whose first rows look as if they numbered them: not all columns are to be read twice."""
    first = rows.keep(np.arange(min(len(rows), 1000)))
    for name in names:
        try:
            likely = may_number_rows(first.numbers(name, "features"), owner[: len(first)])
        except UserError:
            likely = True  # the message about a cell that is no number looks at the whole column
        if likely:
            yield name, rows.numbers(name, "features")


def _owners(rows: Table, site_column: str | None, site: str | None) -> tuple[np.ndarray, list[str]]:
    """(n,) whose each row is, and the sites' names; zeros and the silo's name, or none, without a column of them."""
    if site_column is None:
        return np.zeros(len(rows), dtype=np.int64), [site] if site else []
    words = rows.words(site_column, "site_column")
    names = ordered(list(words))
    twice = near_duplicates(dict.fromkeys(words))
    if twice:
        first, last = (rows.at(int(np.flatnonzero(words == name)[0])) for name in twice)
        said = f"data: {twice[0]!r} ({first}) and {twice[1]!r} ({last}) are two sites; are they one?"
        warnings.warn(said, stacklevel=3)
    number = {name: k for k, name in enumerate(names)}
    return np.array([number[word] for word in words], dtype=np.int64), names


def _groups(rows: Table, group_column: str | None) -> np.ndarray:
    """(n,) the group of each row; () without a column of them."""
    return rows.words(group_column, "group_column") if group_column else np.zeros(0, dtype=str)


def _parts(
    rows: Table, split_column: str | None, group_column: str | None, owner: np.ndarray, aim: Target, fraction: float
) -> np.ndarray:
    """(n,) whether a row is for training."""
    groups = _groups(rows, group_column)
    if split_column is not None:
        words = [word.casefold() for word in rows.words(split_column, "split_column")]
        for row, word in enumerate(words):
            if word not in PARTS:
                raise UserError(f"{rows.at(row)}: column {split_column!r} holds {word!r}; allowed: {', '.join(PARTS)}")
        parts = np.array([PARTS[word] for word in words], dtype=bool)
        check_groups(groups, parts, rows.at, f"{group_column}")  # of all sites: a patient of two is one patient
        return parts
    train = np.ones(len(rows), dtype=bool)
    for k in np.unique(owner):
        mine = np.flatnonzero(owner == k)
        train[mine[holdout(aim.groups[mine], fraction, groups[mine] if len(groups) else ())[1]]] = False
    return train


def _dataset(
    rows: Table,
    aim: Target,
    owner: np.ndarray,
    names: Sequence[str],
    train: np.ndarray,
    plain: TablePreparation,
    options: Options,
) -> Dataset:
    """Features prepared and put together; rows in the order of the file."""
    if not plain.columns:
        raise UserError(f"{rows.path}: no column is left to learn from; correct data.features or data.drop")
    pooled = options.global_test == "pooled" and options.standardise == "site"
    made = fitted(plain, rows, owner, train, options.standardise, pooled)
    if options.missing == "impute":
        _tell_empty(rows, made, names or [""], options.standardise)
    by = owner if len(made.sites) > 1 else np.zeros_like(owner)
    first, last = np.flatnonzero(train), np.flatnonzero(~train)
    parts = [(each, made.inputs(rows, by, each)) for each in (first, last)]
    for which, x in parts if options.standardise == "none" else ():
        if bool(x.isnan().any()):
            k, column = x.isnan().nonzero()[0].tolist()
            row = int(which[k])
            whose = f"site {names[owner[row]]}" if names else "the table"
            what = f"column {made.meaning[column]!r} is empty, and in all of the training rows of {whose}"
            raise UserError(f"{rows.at(row)}: {what}; put it into data.drop, or let data.standardise make it 0")
    (_, train_x), (_, test_x) = parts
    if plain.site_column is not None or not names:  # a silo's column may differ at the others
        warn_of_constants(rows, train_x, made)
    site = torch.from_numpy(owner) if names else None
    return Dataset(
        *(train_x, aim.y[first], test_x, aim.y[last], len(aim.names) or aim.outputs),
        site=None if site is None else site[first],
        test_site=None if site is None else site[last],
        site_names=tuple(names),
        global_x=made.inputs(rows, by, last, pooled=True) if pooled else None,
        meaning=(*made.meaning, "->", *aim.names),
        preparation=made,
    )


def _columns(rows: Table, options: Options, owner: np.ndarray, train: np.ndarray) -> tuple[Column, ...]:
    """The columns to learn from; a categorical one with the values given, else those in the training part."""
    found = []
    for name in options.features or ():
        if name not in options.categorical:
            found.append(Column(name))
            continue
        given = options.categorical[name]
        values = ordered(list(rows.words(name, "categorical")[train])) if given is None else given
        if given is None:
            warn_of_words(rows, name, values, owner, train)
        found.append(Column(name, tuple(values), closed=given is not None))
    return tuple(found)


def _tell_empty(rows: Table, made: TablePreparation, names: Sequence[str], standardise: str) -> None:
    """Tell of columns that have no value at a site. Of numbers that are not standardised that is refused."""
    fits = [made.sites.get(name) or made.sites[""] for name in names]
    for at, column in enumerate(made.columns):
        if column.values is not None or standardise != "none":
            tell_empty(rows, column.name, [name for name, fit in zip(names, fits, strict=True) if fit.fill[at] is None])
