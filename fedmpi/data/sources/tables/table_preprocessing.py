"""Convert table rows to inputs of a model: fill missing values, one-hot encode words, standardise numbers."""

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
from fedmpi.data.sources.tables.read_table import (
    Table,
    check_no_missing_cells,
    read_table,
    read_targets,
    table_from_memory,
)

COLUMNS_PER_COPY = 2  # number of columns that are copied at a time to compute moments; limits memory


@dataclass(frozen=True)
class FeatureColumn:
    """A column of a table that is converted to one or more inputs of the model.

    Attributes:
        values: the categories of a categorical column, which is one-hot encoded; None: the column contains numbers.
        closed: whether a word that is not in `values` raises an error; otherwise it is encoded as zeros.
    """

    name: str
    values: tuple[str, ...] | None = None
    closed: bool = False


@dataclass(frozen=True)
class TrainingStatistics:
    """Statistics of the training rows of one site, or of all sites.

    Attributes:
        fill: for each column, the value that replaces missing values; None: they are not replaced.
        mean, deviation: for each column of numbers, the mean and the standard deviation for standardisation; mean is
            None if numbers are not standardised.
    """

    fill: tuple[float | str | None, ...]
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] = ()


@dataclass(frozen=True)
class TablePreparation(Preparation):
    """The conversion of table rows to inputs of a model.

    Attributes:
        columns: the feature columns in the order of the inputs.
        sites: the statistics of each site by its name, or a single entry "" for all rows.
        labels: the label columns.
        class_names: the classes, ordered by class number; () if targets are numbers.
        missing: what happens to rows with missing values: refuse, impute or drop (see `table`).
        site_column, delimiter, decimal: options of the source `table`.
        zero_is_gap: numeric columns in which 0 stands for a missing value.
        missing_values: column -> additional strings that stand for missing values; the key "" applies to all columns.
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
        """The sites that have statistics of their own."""
        return tuple(name for name in self.sites if name)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the classes, or of the label columns if targets are numbers."""
        return self.class_names or self.labels

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs, such as `age` or `city=Ulm`."""
        names = ([c.name] if c.values is None else [f"{c.name}={value}" for value in c.values] for c in self.columns)
        return [name for group in names for name in group]

    def to_inputs(self, rows: Table, owner: np.ndarray) -> Tensor:
        """Convert rows to inputs (n, f) float32.

        With standardisation, missing values that have not been imputed become 0; without it, they remain NaN.

        Args:
            rows: the table.
            owner: (n,) the index of each row's site in `sites`.
        """
        columns, numeric = [], 0
        for position, column in enumerate(self.columns):
            cells = self.fill_column(position, rows, owner)
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

    def fill_column(self, position: int, rows: Table, owner: np.ndarray) -> np.ndarray:
        """Return a column (n,), with missing values filled if the site has a fill value for the column.

        Args:
            position: the index of the column in `columns`.
            rows: the table.
            owner: (n,) the index of each row's site in `sites`.
        """
        column = self.columns[position]
        cells = _read_cells(rows, column)
        if column.name in self.zero_is_gap:
            cells[cells == 0] = np.nan
        gap = np.isnan(cells) if column.values is None else cells == ""
        fills = [fit.fill[position] for fit in self.sites.values()]
        for k in np.unique(owner[gap]):
            if fills[k] is not None:
                cells[gap & (owner == k)] = fills[k]
        return cells

    # ---- new rows ----
    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        """Return the inputs of new rows, with their targets if the rows have labels."""
        rows = read_new_rows(request, self.delimiter, self.decimal)
        missing_column = next((c.name for c in self.columns if c.name not in rows.columns), None)
        if missing_column is not None:
            needed = f"column {missing_column!r}, with which the model was trained"
            raise UserError(f"{rows.path} has no {needed}; {suggest_name(missing_column, rows.columns)}")
        category_values = {c.name: c.values for c in self.columns if c.values is not None}
        rows = replace(
            rows, valid_words=category_values | {self.labels[0]: self.class_names}, missing_words=self.missing_values
        )
        rows = self._drop_incomplete_rows(
            rows.parse_columns([c.name for c in self.columns if c.values is None], "features")
        )
        x = self.to_inputs(rows, self._find_site_indices(rows, request.site))
        column = self.site_column
        sites = (
            rows.parse_words(column, "site_column").tolist() if column is not None and column in rows.columns else ()
        )
        new = NewRows(identify_rows(rows, request), x, sites=sites, where=rows.row_location)
        return add_targets(new, rows, self.labels, self.class_names)

    def _drop_incomplete_rows(self, rows: Table) -> Table:
        """Drop rows with missing values (`missing: drop`), or raise UserError if there are any (`missing: refuse`)."""
        gaps = {c.name: rows.is_missing(c.name, "features") for c in self.columns}
        gap = np.any(list(gaps.values()), axis=0)
        if self.missing == "impute" or not gap.any():
            return rows
        first = int(gap.argmax())
        column = next(name for name, cells in gaps.items() if cells[first])
        where = f"{rows.row_location(first)}: the cell in column {column!r} is empty"
        if self.missing == "refuse" or gap.all():
            raise UserError(
                f"{where}; fill in a value, because data.missing: {self.missing} replaces no missing values"
            )
        number = pluralize(int(gap.sum()), "row")
        warnings.warn(f"{where}; {number} of {len(rows)} dropped, as in training (data.missing: drop)", stacklevel=2)
        return rows.select_rows(np.flatnonzero(~gap))

    def _find_site_indices(self, rows: Table, site: str | None) -> np.ndarray:
        """Return the index of each row's site in `sites`, (n,)."""
        names, column = list(self.sites), self.site_column
        allowed = f"sites: {shorten(', '.join(names), 200)}"
        if site is not None and site not in names:
            raise UserError(f"site {site!r} does not exist in this run; {allowed}")
        if site is not None or len(names) == 1:
            return np.full(len(rows), names.index(site) if site is not None else 0)
        if column is None or column not in rows.columns:
            remedy = f"{f'add a column {column!r}, or ' if column else ''}set --site NAME (in Python: site=NAME)"
            raise UserError(
                f"{rows.path}: rows are prepared with the statistics of their site, which is not known; {remedy}; "
                f"{allowed}"
            )
        words = rows.parse_words(column, "site_column")
        unknown = next((row for row, word in enumerate(words) if word not in self.sites), None)
        if unknown is not None:
            raise UserError(
                f"{rows.row_location(unknown)}: column {column!r} contains {words[unknown]!r}, not a site of this "
                f"run; {allowed}"
            )
        return np.array([names.index(word) for word in words], dtype=np.int64)


def read_new_rows(request: PredictionRequest, delimiter: str, decimal: Literal[".", ","] = ".") -> Table:
    """Read new rows from a CSV file, from a Parquet file or from memory, and check that the requested ids exist."""
    if hasattr(request.rows, "columns") or isinstance(request.rows, (dict, list)):
        rows = table_from_memory(request.rows, decimal)
    else:
        rows = read_table(check_path(request), delimiter, decimal)
    for name in request.ids:
        rows.column(name, "--id")
    return rows


def identify_rows(rows: Table, request: PredictionRequest) -> dict[str, np.ndarray]:
    """Return the columns (n,) that identify new rows: their row numbers, and the requested ids."""
    return {rows.row_unit: rows.row_numbers, **{name: decode_cells(rows.columns[name]) for name in request.ids}}


def add_targets(new: NewRows, rows: Table, labels: Sequence[str], class_names: Sequence[str]) -> NewRows:
    """Add targets to new rows if the table has all label columns and their labels are valid.

    Args:
        class_names: the classes, ordered by class number; empty if targets are numbers.
    """
    if any(name not in rows.columns for name in labels):
        return new
    try:
        if not missing_targets_allowed():
            check_no_missing_cells(rows, labels)
        return replace(new, y=read_targets(rows, labels, "class" if class_names else "number", class_names or None).y)
    except UserError as error:
        return replace(new, why_no_targets=str(error))


def _read_cells(rows: Table, column: FeatureColumn) -> np.ndarray:
    """Return the numbers of a column, (n,) with NaN for missing values, or its words with "" for missing values.

    Raises UserError if a column whose values are fixed (`closed`) contains any other word.
    """
    if column.values is None:
        return rows.parse_numbers(column.name, "features")
    words = rows.parse_words(column.name, "categorical")
    known = {"", *column.values}
    unknown = next((row for row, word in enumerate(words) if word not in known), None) if column.closed else None
    if unknown is not None:
        problem = f"column {column.name!r} contains {words[unknown]!r}, which is not in data.categorical.{column.name}"
        remedy = "add it there, or correct the row"
        raise UserError(f"{rows.row_location(unknown)}: {problem} ({', '.join(column.values)}); {remedy}")
    return words


def fit_preparation(
    unfitted: TablePreparation, rows: Table, owner: np.ndarray, train: np.ndarray, standardise: str
) -> TablePreparation:
    """Return a preparation with the statistics of the training rows.

    Args:
        unfitted: the preparation without statistics.
        rows: all rows.
        owner: (n,) the index of each row's site in `unfitted.sites`.
        train: (n,) whether a row is a training row.
        standardise: how numbers are standardised: with the statistics of their own site's training rows (`site`), of
            all training rows (`pooled`), or not at all (`none`).
    """
    groups = {name: (owner == k) & train for k, name in enumerate(unfitted.sites)}
    fills: list[list[float | str | None]] = []  # by column, by site
    for column in unfitted.columns:
        cells = _read_cells(rows, column) if unfitted.missing == "impute" else None
        fills.append([None if cells is None else _fill_value(cells[group]) for group in groups.values()])
    sites = {name: TrainingStatistics(fill) for name, fill in zip(groups, zip(*fills, strict=True), strict=True)}
    if standardise != "none":
        numeric = [position for position, column in enumerate(unfitted.columns) if column.values is None]
        parts = list(groups.values()) if standardise == "site" else [train]
        moments = _compute_moments(replace(unfitted, sites=sites), rows, owner, numeric, parts)
        for k, (name, fit) in enumerate(sites.items()):
            mean, deviation = moments[k % len(parts)].tolist()
            sites[name] = replace(fit, mean=tuple(mean), deviation=tuple(deviation))
    alike = len(set(sites.values())) == 1
    return replace(unfitted, sites={"": next(iter(sites.values()))} if alike else sites)


def _fill_value(cells: np.ndarray) -> float | str | None:
    """Return the median of numbers, or the most frequent word (if tied, the alphabetically first); None if empty."""
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
    """Return the means and standard deviations of columns over parts of the rows.

    Args:
        preparation: fills missing values before the moments are computed.
        owner: (n,) the index of each row's site.
        numeric: the indices of the numeric columns.
        parts: the parts, each as a mask over the rows, (n,) bool.

    Returns:
        (parts, 2, columns), with the mean and the standard deviation on the second axis.
    """
    moments = [np.zeros((len(parts), 2, 0))]
    # No block has a single column if there are several: NumPy sums one column in another order, with other last bits.
    for positions in np.array_split(numeric, max(len(numeric) // COLUMNS_PER_COPY, 1)) if numeric else ():
        x = np.stack([preparation.fill_column(position, rows, owner) for position in positions], axis=1)
        moments.append(np.stack([compute_column_moments(x[part]) for part in parts]))
    return np.concatenate(moments, axis=2)


def standardise_columns(x: np.ndarray, mean: Any, deviation: Any) -> np.ndarray:
    """Return (x - mean) / deviation for x (n, f); NaN and columns with deviation 0 become 0."""
    std = np.asarray(deviation)
    return np.divide(x - np.asarray(mean), std, out=np.zeros_like(x), where=(std > 0) & ~np.isnan(x))


def compute_column_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each column of x (n, f), (f,) each.

    Means ignore NaN; for standard deviations NaN is replaced by the mean. Both are 0 for a column
    without values; the standard deviation is exactly 0 for a constant column.
    """
    gaps = np.isnan(x)
    number = len(x) - gaps.sum(0)
    mean = np.where(gaps, 0, x).sum(0) / np.maximum(number, 1)
    # Values are compared to find constant columns, because the rounded mean of equal numbers may differ by 1e-17.
    varies = np.where(gaps, -np.inf, x).max(0, initial=-np.inf) > np.where(gaps, np.inf, x).min(0, initial=np.inf)
    squares = np.square(np.where(gaps, 0, x - mean))
    return mean, np.where(varies, np.sqrt(squares.sum(0) / max(len(x), 1)), 0.0)
