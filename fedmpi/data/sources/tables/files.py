"""A table in a file, CSV or Parquet, as columns of cells; every cell knows the line that it came from."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import brief, natural_order, nearest, show
from fedmpi.data.sources.tables.arrow import parquet

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
COMMA = re.compile(r"\s*[-+]?[0-9]+,[0-9]+([eE][-+]?[0-9]+)?\s*")  # a number with a decimal comma
WHOLE = re.compile(r"[-+]?[0-9]{1,99}")
DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
OFFICE = {".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, each (n,): float64 with NaN for a gap, or objects: text as it stands in the file."""

    path: Path
    columns: dict[str, np.ndarray]
    places: np.ndarray  # (n,) where each row stands in the file
    unit: str = "line"  # of these places
    decimal: str = "."  # between a number's digits
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by column words that are no gap there: "none"

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
        """Some of the rows."""
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, places=self.places[rows])

    def numbers(self, name: str, key: str) -> np.ndarray:
        """(n,) float64, NaN for a gap. UserError with the first cell that is no finite number."""
        cells = self.column(name, key)
        if cells.dtype != object:
            values = cells.astype(np.float64)
        else:
            values, cells = np.full(len(cells), np.nan), self._pointed(cells)
            there = np.flatnonzero(~gaps(cells))
            try:
                values[there] = np.array(cells[there], dtype=np.float64)
                good = not any("_" in cell for cell in cells[there])  # Python reads 1_0 as 10
            except ValueError:
                good = False
            if not good:
                odd = [row for row in there if not is_number(cells[row])]
                cell, remedy = (
                    cells[odd[0]],
                    "list it in data.categorical (words become columns of 0 and 1), or in data.drop",
                )
                if COMMA.fullmatch(cell):
                    remedy = 'say data.decimal: "," if commas are decimal'
                elif len(odd) < len(there) / 2:
                    remedy = f"correct it, or empty it and say data.missing; or, if these are words, {remedy}"
                raise UserError(
                    f"{self.at(int(odd[0]))}: column {name!r} holds {show(cell)}, which is no number; {remedy}"
                )
        large = np.flatnonzero(np.isinf(values) | (np.abs(values) > np.finfo(np.float32).max))
        if len(large):
            said = f"{self.at(int(large[0]))}: column {name!r} holds {values[large[0]]:g}"
            raise UserError(f"{said}; finite numbers are needed (of float32, which ends at 3.4e38)")
        return values

    def words(self, name: str, key: str) -> np.ndarray:
        """(n,) text; "" for a gap. Numbers in one spelling: 3, 3.0 and 03 are the same word."""
        cells = self.column(name, key)
        if cells.dtype != object:
            return np.array(["" if np.isnan(v) else spelled(float(v)) for v in cells], dtype=object)
        cells = self._pointed(cells)
        empty = gaps(cells, self.named.get(name, ()))
        kinds = {cell: "" if gap else spelling(cell) for cell, gap in zip(cells, empty, strict=True)}
        return np.array([kinds[cell] for cell in cells], dtype=object)

    def _pointed(self, cells: np.ndarray) -> np.ndarray:
        """Cells with a point in the place of a decimal comma; a number that has one already is refused."""
        if self.decimal == ".":
            return cells
        out = cells.copy()
        for row, cell in enumerate(cells):
            if COMMA.fullmatch(cell):
                out[row] = cell.replace(",", ".")
            elif "." in cell and is_number(cell):
                raise UserError(f"{self.at(row)}: {cell!r} has a point, and data.decimal says that commas are decimal")
        return out


def gaps(cells: np.ndarray, named: Collection[str] = ()) -> np.ndarray:
    """(n,) whether a cell says nothing; named: words that say what they say."""
    if cells.dtype != object:
        return np.isnan(cells)
    words = (cell.strip() for cell in cells)
    return np.array([word.casefold() in GAPS and word not in named for word in words], dtype=bool)


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


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def ordered(words: Sequence[str]) -> list[str]:
    """Each word once, in natural order, without the empty one."""
    return natural_order({*words} - {""})


def no_office(path: Path) -> None:
    """UserError for a file that only a spreadsheet program reads."""
    if path.suffix.lower() in OFFICE:
        raise UserError(f"{path} is a spreadsheet program's own file; save it from there as CSV in UTF-8")


def read(path: Path, delimiter: str, decimal: str = ".") -> Table:
    """The table at `path`; its ending says whether it is Parquet."""
    no_office(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        columns = parquet(path)
        rows = len(next(iter(columns.values()))) if columns else 0
        table = Table(path, columns, np.arange(rows), "row")
    else:
        table = _csv(path, delimiter, decimal)
    if not len(table):
        raise UserError(f"{path} holds no row below its header")
    return table


def in_memory(rows: Any) -> Table:
    """The table of a DataFrame, of a mapping of names to columns, or of a list of mappings, one a row."""
    if isinstance(rows, list):
        if not all(isinstance(row, Mapping) for row in rows):
            raise UserError("rows: of a list each entry is one row, a dictionary: {column: value}")
        rows = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    names = list(getattr(rows, "columns", rows))
    columns = {str(name): _cells(rows[name], str(name)) for name in names}
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len({*lengths.values()}) != 1 or 0 in lengths.values():
        said = ", ".join(f"{name} {n}" for name, n in lengths.items()) or "no column"
        raise UserError(f"rows: columns of one length are needed, and at least one row; found {said}")
    return Table(Path("rows"), columns, np.arange(next(iter(lengths.values()))), "row")


def _cells(values: Any, name: str) -> np.ndarray:
    """(n,) float64, or text as a file would hold it, "" for None and NaN."""
    found = np.asarray(values)
    if found.ndim != 1:
        raise UserError(f"rows: column {name!r} has the shape {found.shape}; one value a row is needed")
    if found.dtype.kind in "biuf":
        return found.astype(np.float64)
    cells = np.empty(len(found), dtype=object)
    cells[:] = ["" if cell is None or cell != cell else str(cell) for cell in found.tolist()]
    return cells


def _csv(path: Path, delimiter: str, decimal: str) -> Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if header and header[0].startswith("sep="):  # Excel's own line
                header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, delimiter)
            rows, places = [], []
            for row in reader:
                if not any(map(str.strip, row)):  # Excel leaves such rows behind
                    continue
                if len(row) != len(header):
                    counts = f"{len(row)} cells, the header has {len(header)}"
                    quotes = f" (a cell that holds {delimiter!r} stands in quotes)" if len(row) > len(header) else ""
                    raise UserError(f"{path}, line {reader.line_num}: {counts}{quotes}: {brief(delimiter.join(row))}")
                rows.append(row)
                places.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        told = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {told}; save it anew as that") from error
    columns = {name: np.empty(len(rows), dtype=object) for name in header}
    for k, name in enumerate(header):
        columns[name][:] = [row[k] for row in rows]
    return Table(path, columns, np.array(places, dtype=np.int64), decimal=decimal)


def _check_header(path: Path, header: Sequence[str], delimiter: str) -> None:
    if not header:
        raise UserError(f"{path} is empty; the names of the columns are needed in its first line")
    if len(header) == 1:
        other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
        if other:
            raise UserError(
                f"{path}: its first line holds {other!r}, not {delimiter!r}, between the names of the columns; say "
                f'data.delimiter: "{other.encode("unicode_escape").decode()}"'
            )
    twice = [name for k, name in enumerate(header) if name in header[:k]]
    if twice:
        raise UserError(f"{path}: the column {twice[0]!r} stands twice in its first line")
    if "" in header:
        raise UserError(f"{path}: column {header.index('') + 1} has no name in its first line; name it, or remove it")
