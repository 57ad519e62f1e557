"""How a table's rows become inputs: gaps filled, words made columns of 0 and 1, numbers standardised."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, nearest, shorten
from fedmpi.data.preparation import NewRows, Preparation, Request, file_of
from fedmpi.data.sources.common import gaps_allowed
from fedmpi.data.sources.tables import prepare
from fedmpi.data.sources.tables.coded import with_events, with_gaps
from fedmpi.data.sources.tables.files import Table, in_memory, plain_cells, read
from fedmpi.data.sources.tables.targets import targets

COLUMNS = 2  # whose numbers are held at a time while the moments are taken
ROWS = 1 << 14  # that are prepared at a time


@dataclass(frozen=True)
class Column:
    """A column to learn from. values: the words of which each becomes a column of 0 and 1; None: it holds numbers.
    closed: other words are refused; else their row has zeros in all of these columns."""

    name: str
    values: tuple[str, ...] | None = None
    closed: bool = False


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of each column of numbers."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """What the training rows of one site, or of the whole table, give.

    fill: what stands in for a gap in each column; None where nothing does. moments: by which numbers are standardised;
    None: they are not.
    """

    fill: tuple[float | str | None, ...]
    moments: Moments | None


@dataclass(frozen=True)
class TablePreparation(Preparation):
    """The columns of a table in the order of the inputs, and what fills and standardises them.

    sites: by the name of each site, or under "" for all rows alike. pooled: by what the global test set is
    standardised, where that is not by the site of each row. zero_is_gap: columns of
    numbers in which 0 says that nothing was measured. missing_values: words that are gaps, by column, "" for all.
    event_words: 1 or 0 by the word of the event, where times of survival are learned.
    """

    columns: tuple[Column, ...]
    sites: dict[str, Fit]
    labels: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    pooled: Moments | None = None
    missing: Literal["refuse", "impute", "drop"] = "refuse"
    site_column: str | None = None
    delimiter: str = ","
    decimal: Literal[".", ","] = "."
    thousands: str | None = None
    zero_is_gap: tuple[str, ...] = ()
    missing_values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    event_words: dict[str, int] = field(default_factory=dict)

    kind: ClassVar[str] = "table"

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.sites if name)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.class_names or self.labels

    @property
    def meaning(self) -> list[str]:
        """What each input stands for."""
        names = ([c.name] if c.values is None else [f"{c.name}={value}" for value in c.values] for c in self.columns)
        return [name for group in names for name in group]

    @property
    def numeric(self) -> np.ndarray:
        """(f,) whether an input is a number, and not a word's column of 0 and 1."""
        return np.concatenate([[True] if c.values is None else [False] * len(c.values) for c in self.columns])

    def inputs(self, rows: Table, owner: np.ndarray, which: np.ndarray, pooled: bool = False) -> Tensor:
        """(m, f) float32 inputs of some rows, NaN where nothing fills a gap and numbers are not standardised.

        A few rows are worked on at a time: numbers of float64 take several times the memory of their file.

        Args:
            owner: (n,) the place of each row's site in `sites`.
            which: (m,) the numbers of the rows, in ascending order.
            pooled: whether they are standardised as the rows of the global test set are.
        """
        out = torch.empty(len(which), len(self.numeric))
        for begin in range(0, len(which), ROWS):
            some = which[begin : begin + ROWS]
            filled = self._filled(rows.keep(some), owner[some])
            out[begin : begin + ROWS] = torch.from_numpy(self._standardised(filled, owner[some], pooled))
        return out

    def _filled(self, rows: Table, owner: np.ndarray) -> np.ndarray:
        """(n, f) float64 inputs before they are standardised."""
        blocks = []
        for at, column in enumerate(self.columns):
            cells = self.filled_column(at, rows, owner)
            blocks.append(cells[:, None] if column.values is None else prepare.one_hot(cells, column.values))
        return np.concatenate(blocks, axis=1)

    def filled_column(self, at: int, rows: Table, owner: np.ndarray) -> np.ndarray:
        """(n,) the numbers or words of column number `at`, with gaps filled where something fills them."""
        column, fits = self.columns[at], list(self.sites.values())
        cells = cells_of(rows, column)
        if column.name in self.zero_is_gap:
            cells[cells == 0] = np.nan
        gap = np.isnan(cells) if column.values is None else cells == ""
        for k in np.unique(owner[gap]):
            fill = fits[k].fill[at]
            if fill is not None:
                cells[gap & (owner == k)] = fill
        return cells

    def _standardised(self, x: np.ndarray, owner: np.ndarray, pooled: bool) -> np.ndarray:
        """(n, f) float64 of what `_filled` gave."""
        numeric = self.numeric
        for k, fit in enumerate(self.sites.values()):
            moments = self.pooled if pooled and self.pooled is not None else fit.moments
            cells = np.ix_(np.flatnonzero(owner == k), numeric)
            if moments is not None and cells[0].size:
                x[cells] = prepare.standardised(x[cells], moments.mean, moments.deviation)
        return x

    # ---- new rows ----
    def read(self, request: Request) -> NewRows:
        rows = self._table(request)
        lost = [c.name for c in self.columns if c.name not in rows.columns]
        if lost:
            said = f"column {lost[0]!r}, which the model was trained with"
            more = f" (nor {shorten(', '.join(map(repr, lost[1:])))})" if lost[1:] else ""
            raise UserError(f"{rows.path} has no {said}{more}; {nearest(lost[0], rows.columns)}")
        for name in request.ids:
            rows.column(name, "--id")
        self._tell_unused(rows, request)
        rows = self._without_gaps(rows)
        owner, pooled = self._owners(rows, request.site)
        x = self.inputs(rows, owner, np.arange(len(rows)), pooled)
        ids = {rows.unit: rows.places, **{name: plain_cells(rows.columns[name]) for name in request.ids}}
        column = self.site_column
        sites = rows.words(column, "site_column").tolist() if column is not None and column in rows.columns else ()
        return self._with_targets(NewRows(ids, x, sites=sites, where=rows.at), rows)

    def _table(self, request: Request) -> Table:
        if hasattr(request.rows, "columns") or isinstance(request.rows, (dict, list)):
            rows = in_memory(request.rows, self.decimal, self.thousands)
        else:
            rows = read(file_of(request), self.delimiter, self.decimal, self.thousands)
        named = {c.name: frozenset(c.values) for c in self.columns if c.values is not None}
        rows = replace(rows, named=named | {name: frozenset(self.class_names) for name in self.labels[:1]})
        given = {name: words for name, words in self.missing_values.items() if not name or name in rows.columns}
        return with_gaps(rows, given)

    def _tell_unused(self, rows: Table, request: Request) -> None:
        known = {*(c.name for c in self.columns), *self.labels, self.site_column, *request.ids, *rows.index}
        unused = [name for name in rows.columns if name not in known]
        if unused:
            said = f"{rows.path}: not used, for the model was trained without: {shorten(', '.join(unused), 200)}"
            warnings.warn(said, stacklevel=2)

    def _without_gaps(self, rows: Table) -> Table:
        """The rows that the training would have taken: `data.missing` says what becomes of a gap."""
        if self.missing == "impute":
            return rows
        holes = {c.name: rows.gaps(c.name, "features") for c in self.columns}
        gap = np.any(list(holes.values()), axis=0)
        if not gap.any():
            return rows
        first = int(gap.argmax())
        column = next(name for name, hole in holes.items() if hole[first])
        where = f"{rows.at(first)}: column {column!r} is empty"
        if self.missing == "refuse" or gap.all():
            raise UserError(f"{where}, and the training fills no gaps (data.missing: {self.missing}); fill it")
        many = count(int(gap.sum()), "row")
        warnings.warn(f"{where}; {many} of {len(rows)} left out, as in training (data.missing: drop)", stacklevel=2)
        return rows.keep(np.flatnonzero(~gap))

    def _owners(self, rows: Table, site: str | None) -> tuple[np.ndarray, bool]:
        """(n,) the place of each row's site in `sites`, and whether rows are standardised as the global test set is."""
        names, column = list(self.sites), self.site_column
        allowed = f"sites: {shorten(', '.join(names), 200)}"
        if site is not None and site not in names:
            raise UserError(f"there is no site {site!r} in this run; {allowed}")
        if site is not None or len(names) == 1:
            return np.full(len(rows), names.index(site) if site is not None else 0), site is None
        if column is not None and column in rows.columns:
            words = rows.words(column, "site_column")
            odd = next((row for row, word in enumerate(words) if word not in self.sites), None)
            if odd is not None:
                raise UserError(f"{rows.at(odd)}: {column} is {words[odd]!r}, no site of the training; {allowed}")
            place = {name: k for k, name in enumerate(names)}
            return np.array([place[word] for word in words], dtype=np.int64), True
        if self.pooled is not None and not any(rows.gaps(c.name, "features").any() for c in self.columns):
            return np.zeros(len(rows), dtype=np.int64), True
        needed = f"a column {column!r}, or " if column else ""
        raise UserError(
            f"{rows.path}: each site's rows are prepared by the training rows of that site: {needed}the site that all "
            f"rows are of is needed: --site NAME, in Python site=; {allowed}"
        )

    def _with_targets(self, found: NewRows, rows: Table) -> NewRows:
        """The targets, too, where all of the label columns are there and hold what they held in training."""
        if any(name not in rows.columns for name in self.labels):
            return found
        try:
            for name in () if gaps_allowed() else self.labels:
                hole = rows.gaps(name, "label_column")
                if hole.any():
                    raise UserError(f"{rows.at(int(hole.argmax()))}: column {name!r} is empty")
            if self.event_words:
                rows = with_events(rows, self.labels[0], self.event_words)
            names = self.class_names or None
            return replace(found, y=targets(rows, self.labels, "class" if names else "number", names).y)
        except UserError as error:
            return replace(found, no_targets=str(error))


def cells_of(rows: Table, column: Column) -> np.ndarray:
    """(n,) the numbers of a column, NaN for a gap, or its words, "" for a gap. Raises UserError for a word that a
    closed column does not have."""
    if column.values is None:
        return rows.numbers(column.name, "features")
    words = rows.words(column.name, "categorical")
    known = {"", *column.values}
    odd = next((row for row, word in enumerate(words) if word not in known), None) if column.closed else None
    if odd is not None:
        said = f"column {column.name!r} holds {words[odd]!r}, which is none of data.categorical.{column.name}"
        raise UserError(f"{rows.at(odd)}: {said}: {', '.join(column.values)}")
    return words


def fitted(
    plain: TablePreparation, rows: Table, owner: np.ndarray, train: np.ndarray, standardise: str, pooled: bool
) -> TablePreparation:
    """The preparation with what the training rows give.

    Args:
        plain: the same before it is fitted: its columns, and its sites with no more than their names.
        owner: (n,) the place of each row's site in `plain.sites`.
        train: (n,) whether a row is a training row.
        standardise: `site`, `pooled` or `none`.
        pooled: whether the global test set is standardised by the training rows of all sites.
    """
    fill: list[list[float | str | None]] = [[None] * len(plain.columns) for _ in plain.sites]
    for at, column in enumerate(plain.columns) if plain.missing == "impute" else ():
        cells = cells_of(rows, column)
        for k, own in enumerate(fill):
            own[at] = prepare.usual(cells[train & (owner == k)])
    names = list(plain.sites)
    sites = {name: Fit(tuple(own), None) for name, own in zip(names, fill, strict=True)}
    found = replace(plain, sites=sites)
    if standardise != "none":
        groups = [(owner == k) & train for k in range(len(names))] if standardise == "site" else []
        *by_site, whole = _moments(found, rows, owner, [*groups, train])
        for name, taken in zip(names, by_site or [whole] * len(names), strict=True):
            sites[name] = replace(sites[name], moments=taken)
        found = replace(found, sites=sites, pooled=whole if pooled else None)
    alike = len(set(sites.values())) == 1
    return replace(found, sites={"": next(iter(sites.values()))}) if alike else found


def _moments(filled: TablePreparation, rows: Table, owner: np.ndarray, groups: Sequence[np.ndarray]) -> list[Moments]:
    """Moments of the numeric columns over each group of rows, (n,) bool. A few columns are held at a time: all of them
    take several times the memory of their file."""
    numbers = [at for at, column in enumerate(filled.columns) if column.values is None]
    cuts = list(range(0, len(numbers), COLUMNS))
    if len(cuts) > 1 and len(numbers) - cuts[-1] == 1:
        cuts.pop()  # NumPy adds up a single column in another order than one of several: its last bit may differ
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in groups]
    for begin, end in pairwise([*cuts, len(numbers)]):
        x = np.stack([filled.filled_column(at, rows, owner) for at in numbers[begin:end]], axis=1)
        for part, group in zip(parts, groups, strict=True):
            part.append(prepare.moments(x[group]))
    means = [tuple(number for mean, _ in part for number in mean.tolist()) for part in parts]
    deviations = [tuple(number for _, deviation in part for number in deviation.tolist()) for part in parts]
    return [Moments(*each) for each in zip(means, deviations, strict=True)]
