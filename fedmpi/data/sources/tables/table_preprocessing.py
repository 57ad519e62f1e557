"""The conversion of table rows to inputs: missing values are filled, words encoded as 0 and 1, numbers standardised."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize, shorten, suggest_name
from fedmpi.data.csv_file import decode_cells
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation, check_path
from fedmpi.data.sources.source_utils import missing_targets_allowed
from fedmpi.data.sources.tables.read_table import Table, read_table, read_targets, table_from_memory

COLUMNS_PER_COPY = 2  # number of columns that are copied at a time to compute moments, to limit memory


@dataclass(frozen=True)
class FeatureColumn:
    """A feature column.

    Attributes:
        name: its name.
        values: the words, each of which becomes a column of 0 and 1; None: the column holds numbers.
        closed: other words are errors; otherwise they become zeros in all of these columns.
    """

    name: str
    values: tuple[str, ...] | None = None
    closed: bool = False


@dataclass(frozen=True)
class TrainingStatistics:
    """Statistics of the training rows of one site, or of all sites.

    Attributes:
        fill: by column, the value that replaces missing values; None: they are not replaced.
        mean, deviation: by column of numbers, the values that standardise it; mean None: numbers are not standardised.
    """

    fill: tuple[float | str | None, ...]
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] = ()


@dataclass(frozen=True)
class TablePreparation(Preparation):
    """The conversion of table rows to inputs: the feature columns in order, and statistics to fill and standardise.

    Attributes:
        sites: the statistics of each site by name, or under "" those for all rows.
        zero_is_gap: columns of numbers in which 0 is a missing value.
        missing_values: by column, or under "" for all columns, words that are missing values.
    """

    columns: tuple[FeatureColumn, ...]
    sites: dict[str, TrainingStatistics]
    labels: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    missing: Literal["refuse", "impute", "drop"] = "refuse"
    site_column: str | None = None
    delimiter: str = ","
    decimal: Literal[".", ","] = "."
    zero_is_gap: tuple[str, ...] = ()
    missing_values: dict[str, tuple[str, ...]] = field(default_factory=dict)

    kind: ClassVar[str] = "table"

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.sites if name)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.class_names or self.labels

    @property
    def input_and_class_names(self) -> list[str]:
        """The names of the inputs, such as `age` or `city=Ulm`."""
        names = ([c.name] if c.values is None else [f"{c.name}={value}" for value in c.values] for c in self.columns)
        return [name for group in names for name in group]

    def to_inputs(self, rows: Table, owner: np.ndarray) -> Tensor:
        """Return the inputs of rows, (n, f) float32; missing values that are neither filled nor standardised stay NaN.

        owner: (n,) the index of each row's site in `sites`.
        """
        columns, numeric = [], 0
        for at, column in enumerate(self.columns):
            cells = self.fill_column(at, rows, owner)
            if column.values is None:
                x = cells[:, None]
                for k, fit in enumerate(self.sites.values()):
                    if fit.mean is not None:
                        own = owner == k
                        x[own] = standardise_columns(x[own], fit.mean[numeric], fit.deviation[numeric])
                numeric += 1
            else:
                x = cells[:, None] == np.array(column.values, dtype=object)
            columns.append(torch.from_numpy(x.astype(np.float32)))
        return torch.cat(columns, dim=1)

    def fill_column(self, at: int, rows: Table, owner: np.ndarray) -> np.ndarray:
        """Return the numbers or words of column number `at`, (n,), with missing values filled if the site can."""
        column = self.columns[at]
        cells = _read_cells(rows, column)
        if column.name in self.zero_is_gap:
            cells[cells == 0] = np.nan
        gap = np.isnan(cells) if column.values is None else cells == ""
        fills = [fit.fill[at] for fit in self.sites.values()]
        for k in np.unique(owner[gap]):
            if fills[k] is not None:
                cells[gap & (owner == k)] = fills[k]
        return cells

    # ---- new rows ----
    def read(self, request: PredictionRequest) -> NewRows:
        if hasattr(request.rows, "columns") or isinstance(request.rows, (dict, list)):
            rows = table_from_memory(request.rows, self.decimal)
        else:
            rows = read_table(check_path(request), self.delimiter, self.decimal)
        lost = next((c.name for c in self.columns if c.name not in rows.columns), None)
        if lost is not None:
            needed = f"column {lost!r}, which the model was trained with"
            raise UserError(f"{rows.path} has no {needed}; {suggest_name(lost, rows.columns)}")
        for name in request.ids:
            rows.column(name, "--id")
        named = {c.name: c.values for c in self.columns if c.values is not None}
        rows = replace(rows, valid_words=named | {self.labels[0]: self.class_names}, missing_words=self.missing_values)
        rows = self._drop_incomplete_rows(
            rows.parse_columns([c.name for c in self.columns if c.values is None], "features")
        )
        x = self.to_inputs(rows, self._find_site_indices(rows, request.site))
        ids = {rows.row_unit: rows.row_numbers, **{name: decode_cells(rows.columns[name]) for name in request.ids}}
        column = self.site_column
        sites = (
            rows.parse_words(column, "site_column").tolist() if column is not None and column in rows.columns else ()
        )
        return self._add_targets(NewRows(ids, x, sites=sites, where=rows.row_location), rows)

    def _drop_incomplete_rows(self, rows: Table) -> Table:
        """Drop rows with missing values if `data.missing` is drop; raise UserError if it is refuse."""
        gaps = {c.name: rows.is_missing(c.name, "features") for c in self.columns}
        gap = np.any(list(gaps.values()), axis=0)
        if self.missing == "impute" or not gap.any():
            return rows
        first = int(gap.argmax())
        column = next(name for name, cells in gaps.items() if cells[first])
        where = f"{rows.row_location(first)}: column {column!r} is empty"
        if self.missing == "refuse" or gap.all():
            raise UserError(f"{where}, and the training fills no gaps (data.missing: {self.missing}); fill it")
        number = pluralize(int(gap.sum()), "row")
        warnings.warn(f"{where}; {number} of {len(rows)} left out, as in training (data.missing: drop)", stacklevel=2)
        return rows.select_rows(np.flatnonzero(~gap))

    def _find_site_indices(self, rows: Table, site: str | None) -> np.ndarray:
        """Return the index of each row's site in `sites`, (n,)."""
        names, column = list(self.sites), self.site_column
        allowed = f"sites: {shorten(', '.join(names), 200)}"
        if site is not None and site not in names:
            raise UserError(f"there is no site {site!r} in this run; {allowed}")
        if site is not None or len(names) == 1:
            return np.full(len(rows), names.index(site) if site is not None else 0)
        if column is None or column not in rows.columns:
            needed = f"{f'a column {column!r}, or ' if column else ''}--site NAME, in Python site=, is needed"
            raise UserError(f"{rows.path}: rows are prepared by the training rows of their site: {needed}; {allowed}")
        words = rows.parse_words(column, "site_column")
        odd = next((row for row, word in enumerate(words) if word not in self.sites), None)
        if odd is not None:
            raise UserError(f"{rows.row_location(odd)}: {column} is {words[odd]!r}, no site of the training; {allowed}")
        return np.array([names.index(word) for word in words], dtype=np.int64)

    def _add_targets(self, new: NewRows, rows: Table) -> NewRows:
        """Add the targets to new rows if these have all label columns, with values that are valid in training."""
        if any(name not in rows.columns for name in self.labels):
            return new
        try:
            for name in () if missing_targets_allowed() else self.labels:
                gaps = rows.is_missing(name, "label_column")
                if gaps.any():
                    raise UserError(f"{rows.row_location(int(gaps.argmax()))}: column {name!r} is empty")
            names = self.class_names or None
            return replace(new, y=read_targets(rows, self.labels, "class" if names else "number", names).y)
        except UserError as error:
            return replace(new, why_no_targets=str(error))


def _read_cells(rows: Table, column: FeatureColumn) -> np.ndarray:
    """Return the numbers of a column, (n,) with NaN for missing values, or its words with "" for missing values.

    Raises UserError if a closed column has a word that is not in its list.
    """
    if column.values is None:
        return rows.parse_numbers(column.name, "features")
    words = rows.parse_words(column.name, "categorical")
    known = {"", *column.values}
    odd = next((row for row, word in enumerate(words) if word not in known), None) if column.closed else None
    if odd is not None:
        problem = f"column {column.name!r} holds {words[odd]!r}, which is none of data.categorical.{column.name}"
        raise UserError(f"{rows.row_location(odd)}: {problem}: {', '.join(column.values)}")
    return words


def fit_preparation(
    plain: TablePreparation, rows: Table, owner: np.ndarray, train: np.ndarray, standardise: str
) -> TablePreparation:
    """Compute the statistics of a preparation from the training rows.

    Args:
        plain: the columns, and the names of the sites without statistics.
        rows: all rows.
        owner: (n,) the index of each row's site in `plain.sites`.
        train: (n,) whether a row is a training row.
        standardise: `site`, `pooled` or `none`.
    """
    groups = {name: (owner == k) & train for k, name in enumerate(plain.sites)}
    fills: list[list[float | str | None]] = []  # by column, by site
    for column in plain.columns:
        cells = _read_cells(rows, column) if plain.missing == "impute" else None
        fills.append([None if cells is None else _fill_value(cells[group]) for group in groups.values()])
    sites = {name: TrainingStatistics(fill) for name, fill in zip(groups, zip(*fills, strict=True), strict=True)}
    if standardise != "none":
        numeric = [at for at, column in enumerate(plain.columns) if column.values is None]
        parts = list(groups.values()) if standardise == "site" else [train]
        moments = _compute_moments(replace(plain, sites=sites), rows, owner, numeric, parts)
        for k, (name, fit) in enumerate(sites.items()):
            mean, deviation = moments[k % len(parts)].tolist()
            sites[name] = replace(fit, mean=tuple(mean), deviation=tuple(deviation))
    alike = len(set(sites.values())) == 1
    return replace(plain, sites={"": next(iter(sites.values()))} if alike else sites)


def _fill_value(cells: np.ndarray) -> float | str | None:
    """Return the median of numbers, or the most frequent word (of ties the first by letters); None without values."""
    if cells.dtype != object:
        numbers = cells[~np.isnan(cells)]
        return float(np.median(numbers)) if len(numbers) else None
    words, counts = np.unique(cells[cells != ""].astype(str), return_counts=True)
    return str(words[counts.argmax()]) if len(words) else None


def _compute_moments(
    preparation: TablePreparation,
    rows: Table,
    owner: np.ndarray,
    numeric: Sequence[int],
    parts: Sequence[np.ndarray],
) -> np.ndarray:
    """Return means and deviations of the filled columns `numeric` over each part of the rows, (parts, 2, columns)."""
    moments = [np.zeros((len(parts), 2, 0))]
    # Several columns are never split into single ones: NumPy sums one column in another order, with other last bits.
    for few in np.array_split(numeric, max(len(numeric) // COLUMNS_PER_COPY, 1)) if numeric else ():
        x = np.stack([preparation.fill_column(at, rows, owner) for at in few], axis=1)
        moments.append(np.stack([compute_column_moments(x[part]) for part in parts]))
    return np.concatenate(moments, axis=2)


def standardise_columns(x: np.ndarray, mean: Any, deviation: Any) -> np.ndarray:
    """Return (x - mean) / deviation for x (n, f); NaN, and columns with deviation 0, become 0."""
    std = np.asarray(deviation)
    return np.divide(x - np.asarray(mean), std, out=np.zeros_like(x), where=(std > 0) & ~np.isnan(x))


def compute_column_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means (f,) of x (n, f) without NaN, and the standard deviations (f,) with NaN replaced by the mean.

    Both are 0 for a column without values; the deviation is exactly 0 for a constant column.
    """
    gaps = np.isnan(x)
    number = len(x) - gaps.sum(0)
    mean = np.where(gaps, 0, x).sum(0) / np.maximum(number, 1)
    # Values are compared to find constant columns, because the rounded mean of equal numbers may differ by 1e-17.
    varies = np.where(gaps, -np.inf, x).max(0, initial=-np.inf) > np.where(gaps, np.inf, x).min(0, initial=np.inf)
    squares = np.square(np.where(gaps, 0, x - mean))
    return mean, np.where(varies, np.sqrt(squares.sum(0) / max(len(x), 1)), 0.0)
