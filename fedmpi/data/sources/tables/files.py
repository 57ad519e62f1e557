"""A table in a file, CSV or Parquet, as columns of cells; every cell knows the line that it came from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order, nearest, show
from fedmpi.data.csv_file import check_is_csv, csv_columns, objects, text_of
from fedmpi.data.sources.tables.arrow import read_parquet
from fedmpi.data.sources.tables.numerals import is_number, parsed, spelling, to_python

# Cells without a value, in any case of letters
GAPS = {"", "?", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none"}
BEGINS_A_NUMBER = np.isin(np.arange(256), np.frombuffer(b"0123456789+-.", np.uint8))
INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: 0(\.[0-9]+)*")  # names that pandas gives to an index
TRUTH = {"true": "1", "false": "0", "yes": "1", "no": "0", "t": "1", "f": "0", "y": "1", "n": "0"}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, each (n,): float64 with NaN for a gap, or text as it stands in the file (`csv_columns`)."""

    path: Path
    columns: dict[str, np.ndarray]
    places: np.ndarray  # (n,) where each row stands in the file
    unit: str = "line"  # of these places
    decimal: str = "."  # between a number's digits
    thousands: str | None = None  # between groups of three digits
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by column: values that are no gap, as "none"
    index: tuple[str, ...] = ()  # columns that number the rows, as pandas writes them

    def __len__(self) -> int:
        return len(self.places)

    def at(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        return f"{self.path}, {self.unit} {self.places[row]}"

    def column(self, name: str, key: str) -> np.ndarray:
        """Return a column that the config names under `key`."""
        if name not in self.columns:
            raise UserError(f"{self.path} has no column {name!r} (data.{key}); {nearest(name, self.columns)}")
        return self.columns[name]

    def gaps(self, name: str, key: str) -> np.ndarray:
        """Return (n,) bool, whether a cell of the column has no value."""
        return find_gaps(self.column(name, key), self.named.get(name, ()))

    def keep(self, rows: np.ndarray) -> Table:
        """Return some of the rows, by their numbers in ascending order."""
        if len(rows) == len(self):
            return self
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, places=self.places[rows])

    def numbers(self, name: str, key: str, truth: bool = False) -> np.ndarray:
        """Return a column as (n,) float64, NaN for a gap.

        Args:
            truth: whether words such as True and no are 1 and 0.

        Raises:
            UserError: the first cell that is no finite number.
        """
        cells = self.column(name, key)
        values = np.full(len(cells), np.nan)
        if cells.dtype == np.float64:
            values = cells.copy()
        else:
            there = np.flatnonzero(~find_gaps(cells))
            written = cells[there]
            if truth:
                written = objects([TRUTH.get(cell.strip().casefold(), cell) for cell in text_of(written)])
            if self.decimal != "." or self.thousands is not None:
                written = objects([to_python(cell, self.decimal, self.thousands) for cell in text_of(written)])
            numbers = parsed(written)
            if numbers is None:
                odd = next(k for k, cell in enumerate(text_of(written)) if not is_number(cell))
                self._refuse(name, key, int(there[odd]))
            values[there] = numbers
        large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
        if len(large):
            cell = f"{self.at(int(large[0]))}: column {name!r} holds {values[large[0]]:g}"
            raise UserError(f"{cell}; finite numbers are needed (of float32, which ends at 3.4e38)")
        return values

    def words(self, name: str, key: str) -> np.ndarray:
        """Return a column as (n,) text, "" for a gap. Numbers have one spelling: 3, 3.0 and 03 are the same word."""
        cells = self.column(name, key)
        if cells.dtype == np.float64:
            return np.array(["" if np.isnan(cell) else spelling(float(cell)) for cell in cells], dtype=object)
        values, inverse = np.unique(cells, return_inverse=True)
        empty = find_gaps(values, self.named.get(name, ()))
        words = ["" if gap else self._word(cell) for cell, gap in zip(text_of(values), empty, strict=True)]
        return np.array(words, dtype=object)[inverse]

    def owners(self, site_column: str | None) -> tuple[np.ndarray, list[str]]:
        """Return (n,) the number of each row's site, and the sites' names; zeros and none without such a column."""
        if site_column is None:
            return np.zeros(len(self), dtype=np.int64), []
        words = self.words(site_column, "site_column")
        names = ordered(words)
        number = {name: k for k, name in enumerate(names)}
        return np.array([number.get(word, 0) for word in words], dtype=np.int64), names

    def with_gaps(self, missing: Mapping[str, Sequence[str]]) -> Table:
        """Return the table with a gap for each value in `missing`, by column or under "" for all, that is not named."""
        columns = dict(self.columns)
        for name in missing:
            if name:
                self.column(name, "missing_values")
        for name, cells in self.columns.items():
            words = {*missing.get("", ()), *missing.get(name, ())} - {*self.named.get(name, ())}
            if cells.dtype == np.float64:
                numbers = [float(word) for word in words if is_number(word)]
                columns[name] = np.where(np.isin(cells, numbers), np.nan, cells)
            elif words:
                different = np.unique(cells)
                coded = different[[self._word(cell) in words for cell in text_of(different)]]
                columns[name] = np.where(np.isin(cells, coded), "" if cells.dtype == object else b"", cells)
        return replace(self, columns=columns)

    def _word(self, cell: str) -> str:
        number = to_python(cell, self.decimal, self.thousands)
        return spelling(number if is_number(number) else cell)

    def _refuse(self, name: str, key: str, row: int) -> NoReturn:
        """Raise for a cell that is no number."""
        remedy = "list the column in data.categorical (words become columns of 0 and 1) or in data.drop"
        if key == "label_column":
            remedy = "several label columns, and labels with data.target: number, are numbers (data.event_words)"
        marks = "; data.decimal and data.thousands say how numbers are written"
        cell = text_of(self.columns[name][[row]])[0]
        problem = f"column {name!r} holds {show(cell)}, which is no number"
        raise UserError(f"{self.at(row)}: {problem}: correct it, or {remedy}{marks}")


def find_gaps(cells: np.ndarray, named: Collection[str] = ()) -> np.ndarray:
    """Return (n,) bool, whether a cell has no value; named: words that are values of this column."""
    if cells.dtype == np.float64:
        return np.isnan(cells)
    gaps = np.zeros(len(cells), dtype=bool)
    rows = np.arange(len(cells))
    if cells.dtype != object:  # few cells of a column of numbers have to be looked at
        first = np.ascontiguousarray(cells).view(np.uint8).reshape(len(cells), -1)[:, 0]
        rows = np.flatnonzero(~BEGINS_A_NUMBER[first])
    values, member = np.unique(cells[rows], return_inverse=True)
    words = [text.strip() for text in text_of(values)]
    is_gap = np.array([word.casefold() in GAPS and word not in named for word in words], dtype=bool)
    gaps[rows] = is_gap[member]
    return gaps


def ordered(words: Sequence[str] | np.ndarray) -> list[str]:
    """Return each word once, in natural order, without the empty one."""
    return natural_order({*words} - {""})


def read(path: Path, delimiter: str, decimal: str = ".", thousands: str | None = None) -> Table:
    """Read the table at `path`; its ending says whether it is Parquet."""
    check_is_csv(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        columns, index = read_parquet(path)
        places, unit = np.arange(len(next(iter(columns.values()))) if columns else 0), "row"
    else:
        columns, places = csv_columns(path, delimiter, lambda header: _check_header(path, header, delimiter))
        index, unit = tuple(name for name in columns if not name), "line"
    if not len(places):
        raise UserError(f"{path} holds no row below its header")
    index += tuple(name for name in columns if INDEX.fullmatch(name) and name not in index)
    return Table(path, columns, places, unit, decimal, thousands, index=index)


def in_memory(rows: Any, decimal: str = ".", thousands: str | None = None) -> Table:
    """Make a table of a DataFrame, of a mapping of names to columns, or of a list of mappings, one a row.

    decimal, thousands: the marks in numbers that come as text.
    """
    if isinstance(rows, list):
        if not all(isinstance(row, Mapping) for row in rows):
            raise UserError("rows: of a list each entry is one row, a dictionary: {column: value}")
        rows = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    names = list(getattr(rows, "columns", rows))
    columns = {str(name): _cells(rows[name], str(name), decimal) for name in names}
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len({*lengths.values()}) != 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} {n}" for name, n in lengths.items()) or "no column"
        raise UserError(f"rows: columns of one length are needed, and at least one row; found {shown}")
    return Table(Path("rows"), columns, np.arange(next(iter(lengths.values()))), "row", decimal, thousands)


def _cells(values: Any, name: str, decimal: str) -> np.ndarray:
    """(n,) float64, or text as a file with this decimal mark would hold it, "" for None and NaN."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise UserError(f"rows: column {name!r} has the shape {array.shape}; one value a row is needed")
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    each = values.tolist() if hasattr(values, "tolist") else values  # in the array numbers beside words became words
    cells = []
    for value in each:
        text = "" if value is None or value != value else str(value)
        cells.append(text.replace(".", decimal) if isinstance(value, (int, float)) else text)
    return objects(cells)


def _check_header(path: Path, header: Sequence[str], delimiter: str) -> None:
    other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other:
        remedy = f'say data.delimiter: "{other.encode("unicode_escape").decode()}"'
        raise UserError(f"{path}: its first line holds {other!r}, not {delimiter!r}, between names; {remedy}")
    twice = next((name for k, name in enumerate(header) if name and name in header[:k]), None)
    if twice:
        raise UserError(f"{path}: the column {twice!r} stands twice in its first line")
    if "" in header[1:]:  # the first column without a name is an index of pandas
        place = header.index("", 1) + 1
        raise UserError(f"{path}: column {place} has no name in its first line; name it, or remove it")
