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
from fedmpi.data.sources.tables.arrow import parquet
from fedmpi.data.sources.tables.index import FEW
from fedmpi.data.sources.tables.numerals import is_number

GAPS = {
    "",
    "?",
    "na",
    "n/a",
    "n.a.",
    "#n/a",
    "<na>",
    "nan",
    "null",
    "none",
}  # cells that say nothing, in any case of letters
WHOLE = re.compile(r"[-+]?[0-9]{1,99}")
DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: 0(\.[0-9]+)*")  # names that pandas gives to an index
NO_GAP = np.array([chr(k) in "0123456789+-." for k in range(256)])  # first characters of cells that say something


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, each (n,): float64 with NaN for a gap, or text as it stands in the file (`csv_columns`)."""

    path: Path
    columns: dict[str, np.ndarray]
    places: np.ndarray  # (n,) where each row stands in the file
    unit: str = "line"  # of these places
    decimal: str = "."  # between a number's digits
    thousands: str | None = None  # between groups of three digits
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by column words that are no gap there: "none"
    index: tuple[str, ...] = ()  # columns that number the rows, as pandas writes them
    coded: bool = False  # whether a gap may be a value that the config names (data.missing_values)

    def __len__(self) -> int:
        return len(self.places)

    def at(self, row: int) -> str:
        return f"{self.path}, {self.unit} {self.places[row]}"

    def column(self, name: str, key: str) -> np.ndarray:
        """A column that the config names under `key`."""
        if name not in self.columns:
            raise UserError(f"{self.path} has no column {name!r} (data.{key}); {nearest(name, self.columns)}")
        return self.columns[name]

    def gaps(self, name: str, key: str) -> np.ndarray:
        """(n,) whether a cell says nothing."""
        return gaps(self.column(name, key), self.named.get(name, ()))

    def keep(self, rows: np.ndarray) -> Table:
        """Some of the rows, by their numbers in ascending order."""
        if len(rows) == len(self):
            return self
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, places=self.places[rows])

    def numbers(self, name: str, key: str, truth: bool = False) -> np.ndarray:
        """(n,) float64, NaN for a gap. truth: words such as True and no are 1 and 0.

        Raises:
            UserError: the first cell that is no finite number.
        """
        cells = self.column(name, key)
        if cells.dtype == np.float64:
            values = cells.copy()
        else:
            values = np.full(len(cells), np.nan)
            there = np.flatnonzero(~gaps(cells))
            own = self._plain(cells[there], there)
            if truth:
                own = numerals.truth_as_digits(text_of(own))
            found = numerals.parsed(own)
            if found is None:
                self._refuse(name, key, text_of(cells[there]), text_of(own), there)
            values[there] = found
        large = np.flatnonzero(np.isinf(values) | (np.abs(values) > np.finfo(np.float32).max))
        if len(large):
            said = f"{self.at(int(large[0]))}: column {name!r} holds {values[large[0]]:g}"
            raise UserError(f"{said}; finite numbers are needed (of float32, which ends at 3.4e38)")
        return values

    def words(self, name: str, key: str) -> np.ndarray:
        """(n,) text; "" for a gap. Numbers in one spelling: 3, 3.0 and 03 are the same word."""
        cells = self.column(name, key)
        if cells.dtype == np.float64:
            return np.array(["" if np.isnan(v) else spelled(float(v)) for v in cells], dtype=object)
        first: dict[str | bytes, int] = {}
        for row, cell in enumerate(cells.tolist()):
            first.setdefault(cell, row)
        rows = np.fromiter(first.values(), dtype=np.int64)
        empty = gaps(cells[rows], self.named.get(name, ()))
        own = text_of(self._plain(cells[rows], rows))
        kinds = {
            cell: "" if gap else spelling(word) for cell, word, gap in zip(first, own.tolist(), empty, strict=True)
        }
        out = np.empty(len(cells), dtype=object)
        out[:] = [kinds[cell] for cell in cells.tolist()]
        return out

    def _plain(self, cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Numbers in `cells` (m,), which stand in `rows` (m,), as Python writes them, without marks between thousands.

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
                said = f"{cell!r} has a point, and data.decimal says that commas are decimal"
                raise UserError(f"{self.at(int(rows[k]))}: {said}{remedy if grouped else ''}")
        return out

    def _refuse(self, name: str, key: str, cells: np.ndarray, own: np.ndarray, rows: np.ndarray) -> NoReturn:
        """Raise for the first of `own` (m,) that is no number; cells (m,) as they stand in the file."""
        odd = [k for k, cell in enumerate(own.tolist()) if not is_number(cell)]
        cell = cells[odd[0]]
        remedy = numerals.advice(cell, cells.tolist(), self.decimal, self.thousands)
        if not remedy and key == "label_column":
            remedy = (
                "correct it: several label columns, and labels with data.target: number, are numbers; of the task "
                "survival an event is 1, yes or true (seen), or 0, no or false (censored); other words are named by "
                "data.event_words: {WORD: 1, WORD: 0}"
            )
        elif not remedy:
            remedy = "list it in data.categorical (words become columns of 0 and 1), or in data.drop"
            different = len({*cells.tolist()})
            if different == 1 and len(cells) > 1:
                remedy = "it is the same in all rows, and nothing can be learned from it: list it in data.drop"
            elif is_name(different, len(cells)) and 2 * len(odd) >= len(cells):
                said = f"{different} values in {len(cells)} rows are names of the rows, such as a patient's number"
                remedy = f"{said}, from which nothing can be learned: list it in data.drop"
            elif 2 * len(odd) < len(cells):
                remedy = f"correct it, or empty it and say data.missing; or, if these are words, {remedy}"
        at = self.at(int(rows[odd[0]]))
        raise UserError(f"{at}: column {name!r} holds {show(cell)}, which is no number; {remedy}")


def is_name(different: int, rows: int) -> bool:
    """Whether a column of words with so many different values names its rows; of a few rows that is not to be known."""
    return rows >= FEW and different > 0.9 * rows


def gaps(cells: np.ndarray, named: Collection[str] = ()) -> np.ndarray:
    """(n,) whether a cell says nothing; named: words that say what they say."""
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


def spelled(number: float) -> str:
    """A number as a word: 3.0 is 3."""
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def spelling(cell: str | int | float) -> str:
    """A cell as a word, in the one spelling of its number if it is one: 3.0 is 3. Whole numbers keep all their digits,
    and with an exponent, as identifiers may have by chance (1e5, 10e4), it is a word like others."""
    if not isinstance(cell, str):
        return str(cell) if isinstance(cell, int) else spelled(float(cell))
    word = cell.strip()
    if WHOLE.fullmatch(word):
        return str(int(word))
    return spelled(float(word)) if DECIMAL.fullmatch(word) else word


def ordered(words: Sequence[str]) -> list[str]:
    """Each word once, in natural order, without the empty one."""
    return natural_order({*words} - {""})


def read(path: Path, delimiter: str, decimal: str = ".", thousands: str | None = None) -> Table:
    """The table at `path`; its ending says whether it is Parquet."""
    check_is_csv(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        columns, index = parquet(path)
        places, unit = np.arange(len(next(iter(columns.values()))) if columns else 0), "row"
    else:
        columns, places = csv_columns(path, delimiter, lambda header: _check_header(path, header, delimiter))
        index, unit = tuple(name for name in columns if not name), "line"
    if not len(places):
        raise UserError(f"{path} holds no row below its header")
    index += tuple(name for name in columns if INDEX.fullmatch(name) and name not in index)
    return Table(path, columns, places, unit, decimal, thousands, index=index)


def plain_cells(cells: np.ndarray) -> np.ndarray:
    """(n,) a column as it stands in its file: float64 numbers, or text."""
    return cells if cells.dtype == np.float64 else text_of(cells)


def in_memory(rows: Any, decimal: str = ".", thousands: str | None = None) -> Table:
    """The table of a DataFrame, of a mapping of names to columns, or of a list of mappings, one a row.

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
        said = ", ".join(f"{name} {n}" for name, n in lengths.items()) or "no column"
        raise UserError(f"rows: columns of one length are needed, and at least one row; found {said}")
    return Table(Path("rows"), columns, np.arange(next(iter(lengths.values()))), "row", decimal, thousands)


def _cells(values: Any, name: str, decimal: str) -> np.ndarray:
    """(n,) float64, or text as a file would hold it, "" for None and NaN."""
    found = np.asarray(values)
    if found.ndim != 1:
        raise UserError(f"rows: column {name!r} has the shape {found.shape}; one value a row is needed")
    if found.dtype.kind in "biuf":
        return found.astype(np.float64)
    cells = np.empty(len(found), dtype=object)
    each = values.tolist() if hasattr(values, "tolist") else list(values)  # as an array, numbers beside words are words
    cells[:] = ["" if cell is None or cell != cell else _written(cell, decimal) for cell in each]
    return cells


def _written(value: Any, decimal: str) -> str:
    """A value as a file with this decimal mark would hold it."""
    return str(value).replace(".", decimal) if isinstance(value, (int, float)) else str(value)


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
