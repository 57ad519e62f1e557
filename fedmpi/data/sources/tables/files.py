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
from fedmpi.data.csv_file import check_is_csv, csv_columns, text_of
from fedmpi.data.sources.tables import numerals
from fedmpi.data.sources.tables.arrow import read_parquet
from fedmpi.data.sources.tables.numerals import is_number, spelling

# Cells without a value, in any case of letters
GAPS = {"", "?", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none"}
INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: 0(\.[0-9]+)*")  # names that pandas gives to an index
NO_GAP = np.array([chr(k) in "0123456789+-." for k in range(256)])  # first characters of cells with a value
FEW = 20  # rows; whether a column numbers or names the rows cannot be seen in fewer


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
    coded: bool = False  # whether a gap may be a value that the config names (data.missing_values)

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
        if cells.dtype == np.float64:
            values = cells.copy()
        else:
            values = np.full(len(cells), np.nan)
            there = np.flatnonzero(~find_gaps(cells))
            plain = self._plain(cells[there], there)
            if truth:
                plain = numerals.truth_as_digits(text_of(plain))
            parsed = numerals.parsed(plain)
            if parsed is None:
                self._refuse(name, key, text_of(cells[there]), text_of(plain), there)
            values[there] = parsed
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
        values, rows, inverse = np.unique(cells, return_index=True, return_inverse=True)
        plain = text_of(self._plain(values, rows)).tolist()
        empty = find_gaps(values, self.named.get(name, ()))
        words = ["" if gap else spelling(word) for word, gap in zip(plain, empty, strict=True)]
        return np.array(words, dtype=object)[inverse]

    def _plain(self, cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Write numbers in `cells` (m,), which stand in `rows` (m,), as Python does, without marks between thousands.

        Raises:
            UserError: a number with a decimal point, where commas are decimal.
        """
        if self.decimal == "." and self.thousands is None:
            return cells
        out = text_of(cells).copy()
        for k, cell in enumerate(out.tolist()):
            out[k] = numerals.plain(cell, self.decimal, self.thousands)
            if self.decimal == "," and out[k] == cell and "." in cell and is_number(cell):
                remedy = '; if points separate thousands, say data.thousands: "."'
                grouped = self.thousands is None and numerals.is_grouped(cell, ".", ",")
                problem = f"{cell!r} has a point, and data.decimal says that commas are decimal"
                raise UserError(f"{self.at(int(rows[k]))}: {problem}{remedy if grouped else ''}")
        return out

    def _refuse(self, name: str, key: str, cells: np.ndarray, plain: np.ndarray, rows: np.ndarray) -> NoReturn:
        """Raise for the first of `plain` (m,) that is no number; cells (m,) as they stand in the file."""
        odd = [k for k, cell in enumerate(plain.tolist()) if not is_number(cell)]
        cell = cells[odd[0]]
        different = len({*cells.tolist()})
        remedy = numerals.advice(cell, cells.tolist(), self.decimal, self.thousands)
        if not remedy and key == "label_column":
            remedy = (
                "correct it: several label columns, and labels with data.target: number, are numbers; of the task "
                "survival an event is 1, yes or true (seen), or 0, no or false (censored); other words are named by "
                "data.event_words: {WORD: 1, WORD: 0}"
            )
        elif not remedy and different == 1 and len(cells) > 1:
            remedy = "it is the same in all rows, and nothing can be learned from it: list it in data.drop"
        elif not remedy and names_rows(different, len(cells)) and 2 * len(odd) >= len(cells):
            names = f"{different} values in {len(cells)} rows are names of the rows, such as a patient's number"
            remedy = f"{names}, from which nothing can be learned: list it in data.drop"
        elif not remedy:
            remedy = "list it in data.categorical (words become columns of 0 and 1), or in data.drop"
            if different > 1 and 2 * len(odd) < len(cells):
                remedy = f"correct it, or empty it and say data.missing; or, if these are words, {remedy}"
        at = self.at(int(rows[odd[0]]))
        raise UserError(f"{at}: column {name!r} holds {show(cell)}, which is no number; {remedy}")


def names_rows(different: int, rows: int) -> bool:
    """Return whether a column of words with so many different values names its rows."""
    return rows >= FEW and different > 0.9 * rows


def find_gaps(cells: np.ndarray, named: Collection[str] = ()) -> np.ndarray:
    """Return (n,) bool, whether a cell has no value; named: words that are values of this column."""
    if cells.dtype == np.float64:
        return np.isnan(cells)
    out = np.zeros(len(cells), dtype=bool)
    rows = np.arange(len(cells))
    if cells.dtype != object:
        first = np.ascontiguousarray(cells).view(np.uint8).reshape(len(cells), -1)[:, 0]
        rows = np.flatnonzero(~NO_GAP[first])
    known: dict[str | bytes, bool] = {}
    for row, cell in zip(rows.tolist(), cells[rows].tolist(), strict=True):
        if cell not in known:
            word = (cell if isinstance(cell, str) else cell.decode("ascii")).strip()
            known[cell] = word.casefold() in GAPS and word not in named
        out[row] = known[cell]
    return out


def ordered(words: Sequence[str]) -> list[str]:
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
    cells = np.empty(len(array), dtype=object)
    for k, value in enumerate(each):
        if value is not None and value == value:
            text = str(value)
            cells[k] = text.replace(".", decimal) if isinstance(value, (int, float)) else text
        else:
            cells[k] = ""
    return cells


def _check_header(path: Path, header: Sequence[str], delimiter: str) -> None:
    if len(header) == 1:
        other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
        if other:
            raise UserError(
                f"{path}: its first line holds {other!r}, not {delimiter!r}, between the names of the columns; say "
                f'data.delimiter: "{other.encode("unicode_escape").decode()}"'
            )
    twice = [name for k, name in enumerate(header) if name in header[:k]]
    if twice and twice[0]:
        raise UserError(f"{path}: the column {twice[0]!r} stands twice in its first line")
    if "" in header[1:]:  # the first column without a name is an index of pandas
        place = header.index("", 1) + 1
        raise UserError(f"{path}: column {place} has no name in its first line; name it, or remove it")
