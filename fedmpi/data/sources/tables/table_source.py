"""The data source `table`: CSV or Parquet files with a label column and, if available, a site column."""

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
from fedmpi.common.text import pluralize
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.source_utils import (
    PART_BY_WORD,
    check_groups_not_split,
    encode_groups,
    find_file,
    missing_targets_allowed,
    resolve_file_name,
    resolve_test_fraction,
    split_train_test,
)
from fedmpi.data.sources.tables.read_table import (
    Table,
    TableTargets,
    distinct_words,
    normalize_word,
    read_table,
    read_targets,
)
from fedmpi.data.sources.tables.table_preprocessing import (
    FeatureColumn,
    TablePreparation,
    TrainingStatistics,
    fit_preparation,
)

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
    """A CSV or Parquet file, root/path, whose first line names the columns; in silo mode each silo has its own file.

    In silo mode a site is prepared from its own rows only.

    path: the file, relative to data.root; for silos it may contain {site}, which is replaced by the name of the silo.
    Without path the name of the silo is the file's name.
    label_column: the column to predict. Several columns are one target (n, k), such as event and time for the task
    survival; with target: number the model has one output per column.
    site_column: the column with the owner of each row.
    split_column: the column with train or test for each row; val joins the training part.
    group_column: the column with groups, such as patients, whose rows stay together: in the test part, in the training
    part, or in the rows that data.validation holds out.
    test_fraction: without split_column, the share of each class of each site that is the test part, the same for every
    seed; default 0.2.
    features: the feature columns in this order; by default all others, without those in `drop`.
    drop: columns that are not used.
    categorical: columns of words, each value in the training part becoming a column of 0 and 1; a mapping lists the
    values of each column.
    target: class, number (a regression), or auto, which is class if the labels are words or whole numbers.
    class_names: the labels in the order of their numbers; by default sorted in natural order.
    missing: what to do with a row that has a missing value: refuse it, drop it, or impute the median (for words the
    most frequent value) of its site's training part.
    missing_values: further missing values, such as [-9, unknown], in all columns or by column.
    standardise: numbers are standardised by mean and deviation of the training part of their own site (site), of those
    of all sites (pooled), or not at all (none).
    delimiter: the separator of the cells of a CSV file.
    decimal: the decimal mark of numbers.
    """
    for key, value in {"site_column": site_column, "standardise": standardise}.items():
        if site is not None and (value == "pooled" or (value and key == "site_column")):
            raise UserError(
                f"table: data.{key}: {value} needs the rows of all sites, and a silo sees its own alone; leave it out"
            )
    test_fraction = resolve_test_fraction(test_fraction, f"data.split_column: {split_column}" if split_column else "")
    file = find_file(root, (resolve_file_name("table", site, path),), "table", "correct data.root or data.path")
    rows = read_table(file, delimiter, decimal)
    labels = [label_column] if isinstance(label_column, str) else label_column
    others = {"site_column": site_column, "split_column": split_column, "group_column": group_column}
    keys = dict.fromkeys(labels, "label_column") | {name: key for key, name in others.items() if name}
    features = _select_features(rows, features, drop or (), keys)
    if not features:
        raise UserError(f"{file}: no column is left to learn from; correct data.features or data.drop")
    values = _list_category_values(categorical, features)
    by_column = missing_values if isinstance(missing_values, dict) else {"": missing_values or []}
    for name in by_column:
        if name:
            rows.column(name, "missing_values")
    gap_words = {name: tuple(map(normalize_word, words)) for name, words in by_column.items() if words}
    named = {name: words for name, words in values.items() if words is not None}
    rows = replace(
        rows, valid_words=named | {labels[0]: list(map(normalize_word, class_names or ()))}, missing_words=gap_words
    )
    numeric = [name for name in features if name not in values]
    rows = rows.parse_columns(numeric, "features")
    gaps_stay = missing_targets_allowed() and class_names is None and target != "class"
    keys = {name: key for name, key in keys.items() if key != "label_column" or not gaps_stay}
    rows = _drop_incomplete_rows(rows, dict.fromkeys(features, "features") | keys, missing)

    aim = read_targets(rows, labels, target, class_names)
    owner, names = rows.encode_sites(site_column)
    names = [site] if site else names
    groups = rows.parse_words(group_column, "group_column") if group_column else np.zeros(0, dtype=str)
    train = _select_training_rows(rows, aim, owner, names, groups, split_column, test_fraction)
    plain = TablePreparation(
        columns=tuple(_make_column(rows, name, values, train) for name in features),
        sites=dict.fromkeys(names or [""], TrainingStatistics(())),
        labels=tuple(labels),
        class_names=aim.names,
        missing=missing,
        site_column=site_column,
        delimiter=delimiter,
        decimal=decimal,
        missing_values=gap_words,
    )
    preparation = fit_preparation(plain, rows, owner, train, standardise)
    x = preparation.to_inputs(rows, owner if len(preparation.sites) > 1 else np.zeros_like(owner))
    first, last = torch.from_numpy(train), torch.from_numpy(~train)
    site_of = torch.from_numpy(owner) if names else None
    return Dataset(
        *(x[first], aim.y[first], x[last], aim.y[last], len(aim.names) or aim.outputs),
        site=None if site_of is None else site_of[first],
        test_site=None if site_of is None else site_of[last],
        site_names=tuple(names),
        input_and_class_names=(*preparation.input_and_class_names, "->", *aim.names),
        group=encode_groups(groups[train]) if group_column else None,
        preparation=preparation,
    )


def _select_features(rows: Table, given: list[str] | None, drop: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """Return the feature columns. keys: columns with another role, with the option that names each."""
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


def _list_category_values(
    categorical: list[str] | dict[str, list[Value]] | None, features: Sequence[str]
) -> dict[str, list[str] | None]:
    """Return the values of each column of words in their canonical spelling; None if the training part defines them."""
    values: dict[str, list[str] | None] = dict.fromkeys(categorical or ())
    if isinstance(categorical, dict):
        values = {name: list(map(normalize_word, given)) for name, given in categorical.items()}
    for name, words in values.items():
        if name not in features:
            raise UserError(f"table: data.categorical names {name!r}, which is none of {', '.join(features)}")
        if words is not None and len(set(words)) < len(words):
            raise UserError(f"table: data.categorical.{name} holds a value twice: {', '.join(words)}")
    return values


def _make_column(rows: Table, name: str, values: Mapping[str, list[str] | None], train: np.ndarray) -> FeatureColumn:
    """Return a feature column; the values of a categorical one are those of the config, or of the training part."""
    words = values.get(name)
    if name in values and words is None:
        return FeatureColumn(name, tuple(distinct_words(rows.parse_words(name, "categorical")[train])))
    return FeatureColumn(name, None if words is None else tuple(words), closed=words is not None)


def _drop_incomplete_rows(rows: Table, keys: Mapping[str, str], missing: str) -> Table:
    """Return the table without incomplete rows if `missing` is drop; check that other missing values can be filled.

    keys: the columns that are read, with the option that names each. Raises UserError for a missing value if `missing`
    is refuse, or the column is not a feature, and if no row of a site is left.
    """
    gaps = {name: rows.is_missing(name, key) for name, key in keys.items()}
    for name, key in keys.items():
        if gaps[name].any() and (missing == "refuse" or (missing == "impute" and key != "features")):
            row = int(gaps[name].argmax())
            remedy = "fill it, or say data.missing: impute or drop" if key == "features" else "say data.missing: drop"
            if key == "label_column":
                remedy += "; or task.ignore: nan, if labels that are not known are to be left out of loss and metrics"
            raise UserError(f"{rows.row_location(row)}: column {name!r} is empty; {remedy}")
    incomplete = np.any(list(gaps.values()), axis=0)
    if missing != "drop" or not incomplete.any():
        return rows
    worst = sorted(gaps, key=lambda name: -gaps[name].sum())
    most = ", ".join(f"{name!r} {gaps[name].sum()}" for name in worst[:3] if gaps[name].any())
    dropped = f"data.missing: drop leaves out {incomplete.sum()} of {pluralize(len(rows), 'row')} of {rows.path}"
    if incomplete.all():
        raise UserError(f"{dropped}; most gaps: {most}; put these columns into data.drop")
    warnings.warn(f"{dropped}; most gaps: {most}", stacklevel=3)
    left = rows.select_rows(np.flatnonzero(~incomplete))
    site_column = next((name for name, key in keys.items() if key == "site_column"), None)
    lost = {*rows.encode_sites(site_column)[1]} - {*left.encode_sites(site_column)[1]}
    if lost:
        raise UserError(f"{dropped}, and leaves no row of site {min(lost)!r}; fill them, or leave the site out")
    return left


def _select_training_rows(
    rows: Table,
    aim: TableTargets,
    owner: np.ndarray,
    names: Sequence[str],
    groups: np.ndarray,
    split_column: str | None,
    test_fraction: float,
) -> np.ndarray:
    """Return whether each row is a training row, (n,) bool: by the split column, or drawn by class and site."""
    train = np.ones(len(rows), dtype=bool)
    if split_column is None:
        for own in (np.flatnonzero(owner == k) for k in np.unique(owner)):
            train[own[split_train_test(aim.strata[own], test_fraction, groups[own] if len(groups) else ())[1]]] = False
    else:
        words = [word.casefold() for word in rows.parse_words(split_column, "split_column")]
        odd = next((row for row, word in enumerate(words) if word not in PART_BY_WORD), None)
        if odd is not None:
            allowed = ", ".join(PART_BY_WORD)
            raise UserError(
                f"{rows.row_location(odd)}: column {split_column!r} holds {words[odd]!r}; allowed: {allowed}"
            )
        train = np.array([PART_BY_WORD[word] != "test" for word in words], dtype=bool)
        check_groups_not_split(
            groups, train, rows.row_location
        )  # across sites, because the same patient may occur at two sites
    for k, name in enumerate(names):
        if not train[owner == k].any():
            place = rows.row_location(int(np.argmax(owner == k)))
            raise UserError(f"{place}: site {name!r}, which begins there, has no training row; leave the site out")
    return train
