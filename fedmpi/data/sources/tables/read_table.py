"""Tables from CSV or Parquet files, or from memory, with the line of each row for messages; and their targets."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten, shorten_repr, sort_naturally, suggest_name
from fedmpi.data.csv_file import check_is_csv, decode_cells, read_csv_columns, to_object_array
from fedmpi.data.sources.source_utils import missing_targets_allowed
from fedmpi.data.sources.tables.arrow import read_parquet

# Cells that count as missing values, in upper or lower case
MISSING_WORDS = {"", "?", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none"}
TRUTH_WORDS = {"true": "1", "false": "0", "yes": "1", "no": "0", "t": "1", "f": "0", "y": "1", "n": "0"}
WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,99}")
DECIMAL_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
QUANTITY = re.compile(r"[-+]?[0-9.][0-9.,']*([eE][-+]?[0-9]+)?")  # a number, also with thousands separators
SWAP_MARKS = str.maketrans({",": ".", ".": ","})
MAX_GUESSED_CLASSES = 100  # a column of whole numbers with more distinct values may be a quantity rather than classes


@dataclass(frozen=True, eq=False)
class Table:
    """A table whose columns are (n,) float64 with NaN for a missing value, or text as in the file (`csv_columns`).

    Attributes:
        named: by column, words that are not missing values, such as "none".
        missing: by column, or under "" for all columns, further words that are missing values.
    """

    path: Path
    columns: dict[str, np.ndarray]
    row_numbers: np.ndarray  # (n,) line or row of each row in the file
    row_unit: str = "line"  # unit of the places: line or row
    decimal: str = "."  # decimal mark
    valid_words: Mapping[str, Collection[str]] = field(default_factory=dict)
    missing_words: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_numbers)

    def row_location(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        return f"{self.path}, {self.row_unit} {self.row_numbers[row]}"

    def column(self, name: str, key: str) -> np.ndarray:
        """Return a column that the config names under `key`. Raise UserError if the table does not have it."""
        if name not in self.columns:
            raise UserError(f"{self.path} has no column {name!r} (data.{key}); {suggest_name(name, self.columns)}")
        return self.columns[name]

    def select_rows(self, rows: np.ndarray) -> Table:
        """Return the table with these rows only, given by their numbers in ascending order."""
        if len(rows) == len(self):
            return self
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, row_numbers=self.row_numbers[rows])

    def is_missing(self, name: str, key: str) -> np.ndarray:
        """Return for each cell of a column whether its value is missing, (n,) bool."""
        cells, missing = self.column(name, key), self._missing_words_of(name)
        if cells.dtype == np.float64:
            return np.isnan(cells) | np.isin(cells, [float(word) for word in missing if is_number(word)])
        return np.array([self._is_missing_cell(cell, name, missing) for cell in decode_cells(cells)], dtype=bool)

    def _missing_words_of(self, name: str) -> set[str]:
        return {*self.missing_words.get("", ()), *self.missing_words.get(name, ())} - {*self.valid_words.get(name, ())}

    def _is_missing_cell(self, cell: str, name: str, missing: Collection[str]) -> bool:
        word = cell.strip()
        is_usual = word.casefold() in MISSING_WORDS and word not in self.valid_words.get(name, ())
        return is_usual or (bool(missing) and self._normalize_cell(cell) in missing)

    def parse_numbers(self, name: str, key: str, truth: bool = False) -> np.ndarray:
        """Return a column as (n,) float64, with NaN for missing values.

        Args:
            name: the column.
            key: the option that names it, for messages.
            truth: read words such as True and no as 1 and 0.

        Raises:
            UserError: the first cell that is not a finite number.
        """
        cells, missing = self.column(name, key), self._missing_words_of(name)
        if cells.dtype == np.float64:
            values = cells.copy()
        else:
            values = np.full(len(cells), np.nan)
            for k, cell in enumerate(decode_cells(cells)):
                plain = TRUTH_WORDS.get(cell.strip().casefold(), cell) if truth else cell
                plain = plain.translate(SWAP_MARKS) if self.decimal == "," else plain
                if is_number(plain):
                    values[k] = float(plain)
                elif not self._is_missing_cell(cell, name, missing):
                    raise UserError(
                        f"{self.row_location(k)}: column {name!r} holds {shorten_repr(cell)}, {_number_remedy(key)}"
                    )
        values[np.isin(values, [float(word) for word in missing if is_number(word)])] = np.nan
        large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
        if len(large):
            cell = f"{self.row_location(int(large[0]))}: column {name!r} holds {values[large[0]]:g}"
            raise UserError(f"{cell}; finite numbers are needed (of float32, which ends at 3.4e38)")
        return values

    def parse_columns(self, names: Sequence[str], key: str) -> Table:
        """Return the table with these columns converted to numbers, so that their text is parsed only once."""
        return replace(self, columns={**self.columns, **{name: self.parse_numbers(name, key) for name in names}})

    def parse_words(self, name: str, key: str) -> np.ndarray:
        """Return a column as (n,) text, "" for missing values. Equal numbers are equal words: 3, 3.0 and 03."""
        cells, gaps = self.column(name, key), self.is_missing(name, key)
        words = np.full(len(cells), "", dtype=object)
        if cells.dtype == np.float64:
            words[~gaps] = list(map(normalize_word, cells[~gaps].tolist()))
        else:
            texts = decode_cells(cells[~gaps]).tolist()
            spelled = {cell: self._normalize_cell(cell) for cell in {*texts}}
            words[~gaps] = [spelled[cell] for cell in texts]
        return words

    def encode_sites(self, site_column: str | None) -> tuple[np.ndarray, list[str]]:
        """Return the number of each row's site (n,), and the names of the sites; zeros and [] without a site column."""
        if site_column is None:
            return np.zeros(len(self), dtype=np.int64), []
        words = self.parse_words(site_column, "site_column")
        names = distinct_words(words)
        number = {name: k for k, name in enumerate(names)}
        return np.array([number.get(word, 0) for word in words], dtype=np.int64), names

    def _normalize_cell(self, cell: str) -> str:
        number = cell.translate(SWAP_MARKS) if self.decimal == "," else cell
        return normalize_word(number if is_number(number) else cell)


def _number_remedy(key: str) -> str:
    """Return the remedy for a cell that is not a number, in a column that the config names under `key`."""
    remedy = "list the column in data.categorical (words become columns of 0 and 1) or in data.drop"
    if key == "label_column":
        remedy = "several label columns, and labels with data.target: number, are numbers"
    return f"which is no number: correct it, or {remedy}; data.decimal says how numbers are written"


def is_number(cell: str) -> bool:
    """Return whether a cell is a number. Unlike Python's `float`, 1_0 is not accepted."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def normalize_word(cell: str | int | float) -> str:
    """Return the canonical text of a cell; numbers have one spelling, so that 3.0 is "3".

    Whole numbers keep all their digits. Text with an exponent (1e5, 10e4), which may be an identifier, is kept as a
    word.
    """
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else repr(cell)
    word = str(cell).strip()
    if WHOLE_NUMBER.fullmatch(word):
        return str(int(word))
    return normalize_word(float(word)) if DECIMAL_NUMBER.fullmatch(word) else word


def distinct_words(words: Sequence[str] | np.ndarray) -> list[str]:
    """Return the distinct words in natural order, without the empty one."""
    return sort_naturally({*words} - {""})


# ---- reading ----
def read_table(path: Path, delimiter: str, decimal: str = ".") -> Table:
    """Read the table in a CSV or Parquet file; the extension of the file decides."""
    check_is_csv(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        columns = read_parquet(path)
        places, unit = np.arange(len(next(iter(columns.values()), ()))), "row"
    else:
        columns, places = read_csv_columns(path, delimiter, lambda header: _check_header(path, header, delimiter))
        unit = "line"
    if not len(places):
        raise UserError(f"{path} holds no row below its header")
    return Table(path, columns, places, unit, decimal)


def table_from_memory(rows: Any, decimal: str = ".") -> Table:
    """Return the table of a DataFrame, of a dictionary of columns, or of a list of dictionaries, one per row.

    decimal: the decimal mark of numbers that are given as text.
    """
    if isinstance(rows, list):
        if not all(isinstance(row, Mapping) for row in rows):
            raise UserError("rows: of a list each entry is one row, a dictionary: {column: value}")
        rows = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    names = list(getattr(rows, "columns", rows))
    columns = {str(name): _convert_column(rows[name], str(name), decimal) for name in names}
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len({*lengths.values()}) != 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} {n}" for name, n in lengths.items()) or "no column"
        raise UserError(f"rows: columns of one length are needed, and at least one row; found {shown}")
    return Table(Path("rows"), columns, np.arange(next(iter(lengths.values()))), "row", decimal)


def _convert_column(values: Any, name: str, decimal: str) -> np.ndarray:
    """Convert a column to (n,) float64, or to text as in a file with this decimal mark, with "" for None and NaN."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise UserError(f"rows: column {name!r} has the shape {array.shape}; one value a row is needed")
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    each = values.tolist() if hasattr(values, "tolist") else values  # np.asarray turns numbers beside words into words
    cells = []
    for value in each:
        text = "" if value is None or value != value else str(value)
        cells.append(text.replace(".", decimal) if isinstance(value, (int, float)) else text)
    return to_object_array(cells)


def _check_header(path: Path, header: Sequence[str], delimiter: str) -> None:
    other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other:
        remedy = f'say data.delimiter: "{other.encode("unicode_escape").decode()}"'
        raise UserError(f"{path}: its first line holds {other!r}, not {delimiter!r}, between names; {remedy}")
    twice = next((name for k, name in enumerate(header) if name and name in header[:k]), None)
    if twice:
        raise UserError(f"{path}: the column {twice!r} stands twice in its first line")
    if "" in header:
        place = header.index("") + 1
        remedy = "name it, or remove it; pandas writes none with to_csv(..., index=False)"
        raise UserError(f"{path}: column {place} has no name in its first line; {remedy}")


# ---- targets ----
@dataclass(frozen=True, eq=False)
class TableTargets:
    """The targets of a table: y, (n,) class numbers, or (n,) or (n, k) numbers; the class names, () for numbers."""

    y: Tensor
    names: tuple[str, ...] = ()
    outputs: int = 1  # number of outputs of a model, if there are no classes

    @property
    def strata(self) -> np.ndarray:
        """The class of each row, (n,); zeros for numbers."""
        return self.y.numpy() if self.names else np.zeros(len(self.y), dtype=np.int64)


def read_targets(
    rows: Table, label: Sequence[str], target: str, classes: Sequence[str | int | float] | None
) -> TableTargets:
    """Return the targets in the columns `label`. If missing values are allowed, they are NaN in numbers.

    target: class, number, or auto, which decides by the labels.
    """
    if len(label) > 1 or target == "number" or (target == "auto" and classes is None and missing_targets_allowed()):
        if classes is not None or target == "class":
            raise UserError("table: data.class_names and target: class go with one column, of classes")
        return _read_number_targets(rows, label, len(label) if target == "number" else 1)
    words = rows.parse_words(label[0], "label_column")
    names = distinct_words(words) if classes is None else list(map(normalize_word, classes))
    if len(set(names)) < len(names):
        raise UserError(f"table: data.class_names holds a label twice: {', '.join(names)}")
    if target == "auto" and classes is None:
        if _are_quantities(words):
            return _read_number_targets(rows, label, 1)
        if len(names) > max(MAX_GUESSED_CLASSES, len(rows) // 10):
            many = f"{rows.path}: column {label[0]!r} holds {len(names)} labels in {len(rows)} rows"
            survival = "for the task survival name two columns, data.label_column: [EVENT, TIME]"
            raise UserError(f"{many}; say data.target: class, or number for a regression; {survival}")
        if len(names) == 1:
            one = f"{rows.path}: column {label[0]!r} holds one label alone, {names[0]!r}"
            raise UserError(f"{one}; two are needed, or those that there are in data.class_names")
    number = {name: k for k, name in enumerate(names)}
    odd = next((row for row, word in enumerate(words) if word not in number), None)
    if odd is not None:
        problem = f"column {label[0]!r} holds the label {words[odd]!r}, which is none of data.class_names"
        raise UserError(f"{rows.row_location(odd)}: {problem}: {shorten(', '.join(names), 200)}")
    return TableTargets(torch.tensor([number[word] for word in words]), tuple(names))


def _read_number_targets(rows: Table, label: Sequence[str], outputs: int) -> TableTargets:
    y = np.stack([rows.parse_numbers(name, "label_column", truth=len(label) > 1) for name in label], axis=1)
    return TableTargets(torch.from_numpy(y[:, 0] if len(label) == 1 else y).float(), outputs=outputs)


def _are_quantities(words: np.ndarray) -> bool:
    """Return whether most words are numbers and some of these are not whole: the labels are quantities, not classes."""
    numeric = [word for word in words if QUANTITY.fullmatch(word)]
    return 2 * len(numeric) > len(words) and not all(map(WHOLE_NUMBER.fullmatch, numeric))
