"""The data source `table`: CSV or Parquet files with a label column and optionally a site column."""

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
    """A table in the CSV or Parquet file root/path; in silo mode, one file per silo.

    The first line of a CSV file contains the column names. In silo mode, each site is prepared from its own rows only.

    path: the file, relative to data.root; for silos it may contain {site}, which is replaced by the name of the silo.
    Without path, the name of the silo is the file name.
    label_column: the column to predict. A list of k columns gives targets (n, k), such as event and time for the task
    survival; with `target: number` the model has one output per column.
    site_column: the column with the site of each row.
    split_column: the column with train, val or test for each row; val is added to the training part.
    group_column: the column with groups, such as patients, whose rows are never split between the training part, the
    test part and the rows that data.validation holds out.
    test_fraction: without split_column, the fraction of each class at each site that is held out as the test part, with
    the same rows for every seed; default 0.2.
    features: the feature columns in the order of the inputs; by default all other columns except those in `drop`.
    drop: columns that are not used.
    categorical: text columns, which are one-hot encoded with one input for each value in the training part; a mapping
    lists the values of each column.
    target: class, number (regression), or auto, which is class if the labels are words or integers.
    class_names: the labels, ordered by class number; by default in natural order.
    missing: what happens to rows with a missing value: refuse (an error), drop (the row is left out) or impute (the
    value is replaced by the median of the site's training part, or by the most frequent value of a text column).
    missing_values: additional values that count as missing, such as [-9, unknown]; a mapping lists them by column.
    standardise: how numbers are standardised: with the mean and standard deviation of the training part of their own
    site (site) or of all sites (pooled), or not at all (none).
    delimiter: the character that separates the cells of a CSV file.
    decimal: the decimal mark of numbers.
    """
    for key, value in {"site_column": site_column, "standardise": standardise}.items():
        if site is not None and (value == "pooled" or (value and key == "site_column")):
            raise UserError(
                f"table: data.{key} ({value}) needs the rows of all sites, but with data.silos each site reads only "
                "its "
                f"own rows; remove data.{key}"
            )
    test_fraction = resolve_test_fraction(
        test_fraction, f"data.split_column ({split_column!r})" if split_column else ""
    )
    file = find_file(root, (resolve_file_name("table", site, path),), "table", "correct data.root or data.path")
    rows = read_table(file, delimiter, decimal)
    labels = [label_column] if isinstance(label_column, str) else label_column
    other_columns = {"site_column": site_column, "split_column": split_column, "group_column": group_column}
    keys = dict.fromkeys(labels, "label_column") | {name: key for key, name in other_columns.items() if name}
    features = _select_features(rows, features, drop or (), keys)
    if not features:
        raise UserError(f"{file}: no feature column remains; correct data.features or data.drop")
    values = _parse_categorical_option(categorical, features)
    by_column = missing_values if isinstance(missing_values, dict) else {"": missing_values or []}
    for name in by_column:
        if name:
            rows.column(name, "missing_values")
    missing_words = {name: tuple(map(normalize_word, words)) for name, words in by_column.items() if words}
    category_words = {name: words for name, words in values.items() if words is not None}
    rows = replace(
        rows,
        valid_words=category_words | {labels[0]: list(map(normalize_word, class_names or ()))},
        missing_words=missing_words,
    )
    numeric = [name for name in features if name not in values]
    rows = rows.parse_columns(numeric, "features")
    keeps_missing_targets = missing_targets_allowed() and class_names is None and target != "class"
    keys = {name: key for name, key in keys.items() if key != "label_column" or not keeps_missing_targets}
    rows = _drop_incomplete_rows(rows, dict.fromkeys(features, "features") | keys, missing)

    label_targets = read_targets(rows, labels, target, class_names)
    owner, names = rows.encode_sites(site_column)
    names = [site] if site else names
    groups = rows.parse_words(group_column, "group_column") if group_column else np.zeros(0, dtype=str)
    parts = read_parts(rows, split_column) if split_column else None
    train = select_training_rows(rows, label_targets.strata, owner, names, groups, parts, test_fraction)
    unfitted = TablePreparation(
        columns=tuple(_make_column(rows, name, values, train) for name in features),
        sites=dict.fromkeys(names or [""], TrainingStatistics(())),
        labels=tuple(labels),
        class_names=label_targets.names,
        missing=missing,
        site_column=site_column,
        delimiter=delimiter,
        decimal=decimal,
        missing_values=missing_words,
    )
    preparation = fit_preparation(unfitted, rows, owner, train, standardise)
    x = preparation.to_inputs(rows, owner if len(preparation.sites) > 1 else np.zeros_like(owner))
    train_rows, test_rows = torch.from_numpy(train), torch.from_numpy(~train)
    site_of = torch.from_numpy(owner) if names else None
    return Dataset(
        *(
            x[train_rows],
            label_targets.y[train_rows],
            x[test_rows],
            label_targets.y[test_rows],
            len(label_targets.names) or label_targets.outputs,
        ),
        site=None if site_of is None else site_of[train_rows],
        test_site=None if site_of is None else site_of[test_rows],
        site_names=tuple(names),
        input_and_class_names=(*preparation.input_names, "->", *label_targets.names),
        group=encode_groups(groups[train]) if group_column else None,
        preparation=preparation,
    )


def _select_features(
    rows: Table, features: list[str] | None, drop: Sequence[str], keys: Mapping[str, str]
) -> list[str]:
    """Return the names of the feature columns.

    Args:
        rows: the table.
        features: data.features; None: all columns that are neither in `drop` nor in `keys`.
        drop: data.drop.
        keys: the label, site, split and group columns: a dict from the name of each column to the option that sets it.
    """
    for name, key in {**dict.fromkeys(drop, "drop"), **keys}.items():
        rows.column(name, key)
    if features is not None:
        labels = [name for name, key in keys.items() if key == "label_column"]
        for k, name in enumerate(features):
            rows.column(name, "features")
            if name in [*features[:k], *drop, *labels]:
                where = "data.features lists it twice, or it is also in data.drop or data.label_column"
                raise UserError(f"table: column {name!r}: {where}; list it only once")
        return features
    return [name for name in rows.columns if name not in {*drop, *keys}]


def _parse_categorical_option(
    categorical: list[str] | dict[str, list[Value]] | None, features: Sequence[str]
) -> dict[str, list[str] | None]:
    """Return the normalised values of each categorical column; None if the training part defines them."""
    values: dict[str, list[str] | None] = dict.fromkeys(categorical or ())
    if isinstance(categorical, dict):
        values = {name: list(map(normalize_word, listed)) for name, listed in categorical.items()}
    for name, words in values.items():
        if name not in features:
            raise UserError(
                f"table: data.categorical: {name!r} is not a feature column; features: {', '.join(features)}"
            )
        if words is not None and len(set(words)) < len(words):
            raise UserError(
                f"table: data.categorical.{name} contains a value twice: {', '.join(words)}; list each value only once"
            )
    return values


def _make_column(rows: Table, name: str, values: Mapping[str, list[str] | None], train: np.ndarray) -> FeatureColumn:
    """Return a feature column, with its categories if it is categorical.

    The categories are those that the config lists or, if it lists none, those that occur in the training part.
    """
    words = values.get(name)
    if name in values and words is None:
        return FeatureColumn(name, tuple(distinct_words(rows.parse_words(name, "categorical")[train])))
    return FeatureColumn(name, None if words is None else tuple(words), closed=words is not None)


def _drop_incomplete_rows(rows: Table, keys: Mapping[str, str], missing: str) -> Table:
    """Return the table without incomplete rows if `missing` is drop; otherwise check that missing values can be filled.

    Args:
        keys: a dict from the name of each column that is read to the option that sets it.
        missing: refuse, impute or drop.

    Raises:
        UserError: `missing` is refuse and a value is missing; it is impute and a value is missing in a column that is
            not a feature; or it is drop and a site would have no rows left.
    """
    gaps = {name: rows.is_missing(name, key) for name, key in keys.items()}
    for name, key in keys.items():
        if gaps[name].any() and (missing == "refuse" or (missing == "impute" and key != "features")):
            row = int(gaps[name].argmax())
            remedy = f"fill it in, or set data.missing to {'impute or drop' if key == 'features' else 'drop'}"
            if key == "label_column":
                remedy += ", or set task.ignore: nan, so that losses and metrics ignore missing labels"
            raise UserError(f"{rows.row_location(row)}: the cell in column {name!r} is empty; {remedy}")
    incomplete = np.any(list(gaps.values()), axis=0)
    if missing != "drop" or not incomplete.any():
        return rows
    worst = sorted(gaps, key=lambda name: -gaps[name].sum())
    worst_columns = ", ".join(f"{name!r} ({gaps[name].sum()})" for name in worst[:3] if gaps[name].any())
    dropped = f"data.missing: drop removes {incomplete.sum()} of {pluralize(len(rows), 'row')} of {rows.path}"
    if incomplete.all():
        raise UserError(
            f"{dropped}; columns with most missing values: {worst_columns}; list these columns in data.drop"
        )
    warnings.warn(f"{dropped}; columns with most missing values: {worst_columns}", stacklevel=3)
    complete = rows.select_rows(np.flatnonzero(~incomplete))
    site_column = next((name for name, key in keys.items() if key == "site_column"), None)
    empty_sites = {*rows.encode_sites(site_column)[1]} - {*complete.encode_sites(site_column)[1]}
    if empty_sites:
        raise UserError(
            f"{dropped}, including all rows of site {min(empty_sites)!r}; fill in its values, or remove the site"
        )
    return complete


def read_parts(rows: Table, split_column: str) -> np.ndarray:
    """Return the part of each row as the split column defines it, (n,): train, val or test."""
    words = [word.casefold() for word in rows.parse_words(split_column, "split_column")]
    unknown = next((row for row, word in enumerate(words) if word not in PART_BY_WORD), None)
    if unknown is not None:
        allowed = ", ".join(PART_BY_WORD)
        raise UserError(
            f"{rows.row_location(unknown)}: column {split_column!r} contains {words[unknown]!r}; allowed values: "
            f"{allowed}"
        )
    return np.array([PART_BY_WORD[word] for word in words])


def select_training_rows(
    rows: Table,
    strata: np.ndarray,
    owner: np.ndarray,
    names: Sequence[str],
    groups: np.ndarray,
    parts: np.ndarray | None,
    test_fraction: float,
) -> np.ndarray:
    """Return whether each row is a training row, (n,) bool.

    Args:
        strata: (n,) the class of each row; without `parts`, the test part of each site is drawn stratified by class.
        owner: (n,) the index of each row's site.
        names: the names of the sites.
        groups: (n,) the group of each row; empty without groups.
        parts: (n,) the part of each row: train, val (added to the training part) or test; None: the parts are drawn.
        test_fraction: the fraction of test rows if `parts` is None.
    """
    train = np.ones(len(rows), dtype=bool)
    if parts is None:
        for rows_of_site in (np.flatnonzero(owner == k) for k in np.unique(owner)):
            own_groups = groups[rows_of_site] if len(groups) else ()
            train[rows_of_site[split_train_test(strata[rows_of_site], test_fraction, own_groups)[1]]] = False
    else:
        train = parts != "test"
        check_groups_not_split(
            groups, train, rows.row_location
        )  # across sites, because the same patient may occur at two sites
    for k, name in enumerate(names):
        if not train[owner == k].any():
            location = rows.row_location(int(np.argmax(owner == k)))
            raise UserError(
                f"{location}: site {name!r}, which begins here, has no training rows; add some, or remove the site"
            )
    return train
