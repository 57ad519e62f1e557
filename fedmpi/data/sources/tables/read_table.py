"""Read tables from CSV files, Parquet files or memory, and extract targets from their columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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

# Cells that count as missing values; case is ignored
MISSING_WORDS = {"", "?", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none"}
TRUTH_WORDS = {"true": "1", "false": "0", "yes": "1", "no": "0", "t": "1", "f": "0", "y": "1", "n": "0"}
WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,99}")
DECIMAL_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
QUANTITY = re.compile(r"[-+]?[0-9.][0-9.,']*([eE][-+]?[0-9]+)?")  # a number, also with thousands separators
SWAP_MARKS = str.maketrans({",": ".", ".": ","})
MAX_GUESSED_CLASSES = 100  # with more distinct values, a column of integers may be a quantity rather than classes


@dataclass(frozen=True, eq=False)
class Table:
    """A table of named columns, with the position of each row in its file for messages.

    Attributes:
        columns: the columns by name. A column is float64 (n,) with NaN for missing values, or contains the strings or
            bytes (n,) of the file (see `read_csv_columns`).
        row_numbers: (n,) the position of each row in the file.
        row_unit: what `row_numbers` counts: "line" or "row".
        decimal: the decimal mark of numbers.
        valid_words: by column, words that look like missing values, such as "none", but are not.
        missing_words: by column, additional words that stand for missing values; the key "" applies to all columns.
    """

    path: Path
    columns: dict[str, np.ndarray]
    row_numbers: np.ndarray
    row_unit: str = "line"
    decimal: str = "."
    valid_words: Mapping[str, Collection[str]] = field(default_factory=dict)
    missing_words: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_numbers)

    def row_location(self, row: int) -> str:
        """Return the file and the line or row number of a row, for messages."""
        return f"{self.path}, {self.row_unit} {self.row_numbers[row]}"

    def column(self, name: str, key: str) -> np.ndarray:
        """Return a column; raise UserError if the table does not have it.

        key: the option that names the column, for the message.
        """
        if name not in self.columns:
            raise UserError(f"{self.path} has no column {name!r} (data.{key}); {suggest_name(name, self.columns)}")
        return self.columns[name]

    def select_rows(self, rows: np.ndarray) -> Table:
        """Return the table with only these rows. rows: their indices in ascending order."""
        if len(rows) == len(self):
            return self
        columns = {name: cells[rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, row_numbers=self.row_numbers[rows])

    def is_missing(self, name: str, key: str) -> np.ndarray:
        """Return whether each cell of a column is a missing value, (n,) bool. See `column` for `key`."""
        cells, missing = self.column(name, key), self._missing_words_of(name)
        if cells.dtype == np.float64:
            return np.isnan(cells) | np.isin(cells, [float(word) for word in missing if is_number(word)])
        return np.array([self._is_missing_cell(cell, name, missing) for cell in decode_cells(cells)], dtype=bool)

    def _missing_words_of(self, name: str) -> set[str]:
        """Return the words that `missing_words` declares as missing values in a column."""
        return {*self.missing_words.get("", ()), *self.missing_words.get(name, ())} - {*self.valid_words.get(name, ())}

    def _is_missing_cell(self, cell: str, name: str, missing: Collection[str]) -> bool:
        """Return whether a cell of column `name` is a missing value; missing: the result of `_missing_words_of`."""
        word = cell.strip()
        is_usual = word.casefold() in MISSING_WORDS and word not in self.valid_words.get(name, ())
        return is_usual or (bool(missing) and self._to_canonical_word(cell) in missing)

    def parse_numbers(self, name: str, key: str, truth: bool = False) -> np.ndarray:
        """Convert a column to (n,) float64, with NaN for missing values.

        Args:
            name: the column.
            key: the option that names the column, for messages.
            truth: whether words such as True and no are converted to 1 and 0.

        Raises:
            UserError: a cell is not a finite number; the message names the first one.
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
                        f"{self.row_location(k)}: column {name!r} contains {shorten_repr(cell)}, {_number_remedy(key)}"
                    )
        values[np.isin(values, [float(word) for word in missing if is_number(word)])] = np.nan
        large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
        if len(large):
            cell = f"{self.row_location(int(large[0]))}: column {name!r} contains {values[large[0]]:g}"
            raise UserError(
                f"{cell}; values must be finite float32 numbers (at most 3.4e38 in magnitude); correct it, or drop "
                "the row"
            )
        return values

    def parse_columns(self, names: Sequence[str], key: str) -> Table:
        """Return the table with the columns `names` converted to numbers. See `column` for `key`."""
        return replace(self, columns={**self.columns, **{name: self.parse_numbers(name, key) for name in names}})

    def parse_words(self, name: str, key: str) -> np.ndarray:
        """Convert a column to strings, (n,), with "" for missing values; equal numbers give equal strings."""
        cells, gaps = self.column(name, key), self.is_missing(name, key)
        words = np.full(len(cells), "", dtype=object)
        if cells.dtype == np.float64:
            words[~gaps] = list(map(normalize_word, cells[~gaps].tolist()))
        else:
            texts = decode_cells(cells[~gaps]).tolist()
            normalized = {cell: self._to_canonical_word(cell) for cell in {*texts}}
            words[~gaps] = [normalized[cell] for cell in texts]
        return words

    def encode_sites(self, site_column: str | None) -> tuple[np.ndarray, list[str]]:
        """Return the index of each row's site, (n,), and the names of the sites; zeros and [] without a site column."""
        if site_column is None:
            return np.zeros(len(self), dtype=np.int64), []
        words = self.parse_words(site_column, "site_column")
        names = distinct_words(words)
        number = {name: k for k, name in enumerate(names)}
        return np.array([number.get(word, 0) for word in words], dtype=np.int64), names

    def _to_canonical_word(self, cell: str) -> str:
        """Apply `normalize_word` to a cell after replacing this table's decimal mark with a point."""
        number = cell.translate(SWAP_MARKS) if self.decimal == "," else cell
        return normalize_word(number if is_number(number) else cell)


def check_no_missing_cells(rows: Table, names: Iterable[str]) -> None:
    """Raise UserError if a cell of these columns, which must exist, is a missing value."""
    for name in names:
        gaps = rows.is_missing(name, "")
        if gaps.any():
            where = f"{rows.row_location(int(gaps.argmax()))}: the cell in column {name!r} is empty"
            raise UserError(f"{where}; fill it in, or drop the row")


def _number_remedy(key: str) -> str:
    """Return the remedy for a cell that is not a number. key: the option that names its column."""
    remedy = "list the column in data.categorical (words are one-hot encoded) or in data.drop"
    if key == "label_column":
        remedy = "set data.target: class and a single data.label_column"
    return f"which is not a number; correct it, or {remedy}; for another decimal mark set data.decimal"


def is_number(cell: str) -> bool:
    """Return whether a cell is a number; unlike Python's `float`, this does not accept 1_0."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def normalize_word(cell: str | int | float) -> str:
    """Return the canonical string for a cell, so that equal numbers give equal strings: 3, 3.0 and 03 become "3".

    Integers keep all their digits. Strings with an exponent (1e5, 10e4), which may be identifiers, are not changed.
    """
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else repr(cell)
    word = str(cell).strip()
    if WHOLE_NUMBER.fullmatch(word):
        return str(int(word))
    return normalize_word(float(word)) if DECIMAL_NUMBER.fullmatch(word) else word


def distinct_words(words: Sequence[str] | np.ndarray) -> list[str]:
    """Return the distinct words in natural order, without the empty word."""
    return sort_naturally({*words} - {""})


# ---- reading ----
def read_table(path: Path, delimiter: str, decimal: str = ".") -> Table:
    """Read a table from a file: Parquet if its extension is .parquet or .pq, otherwise CSV."""
    check_is_csv(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        columns = read_parquet(path)
        row_numbers, row_unit = np.arange(len(next(iter(columns.values()), ()))), "row"
    else:
        columns, row_numbers = read_csv_columns(path, delimiter, lambda header: _check_header(path, header, delimiter))
        row_unit = "line"
    if not len(row_numbers):
        raise UserError(f"{path} has no rows below its header")
    return Table(path, columns, row_numbers, row_unit, decimal)


def table_from_memory(rows: Any, decimal: str = ".") -> Table:
    """Convert a DataFrame, a dictionary of columns, or a list of dictionaries (one per row) to a table.

    decimal: the decimal mark of numbers that are given as strings.
    """
    if isinstance(rows, list):
        if not all(isinstance(row, Mapping) for row in rows):
            raise UserError("rows: a list must contain one dictionary {column: value} per row")
        rows = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    names = list(getattr(rows, "columns", rows))
    columns = {str(name): _convert_passed_column(rows[name], str(name), decimal) for name in names}
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len({*lengths.values()}) != 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} {n}" for name, n in lengths.items()) or "no column"
        raise UserError(f"rows: all columns must have the same number of rows, and at least one; they have: {shown}")
    return Table(Path("rows"), columns, np.arange(next(iter(lengths.values()))), "row", decimal)


def _convert_passed_column(values: Any, name: str, decimal: str) -> np.ndarray:
    """Convert a column that the user has passed as a Python object to an array (n,).

    The array has the type float64 if all values are numbers; otherwise it contains strings. In strings, None and NaN
    become "", and numbers are written with `decimal` as the decimal mark.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise UserError(f"rows: column {name!r} has the shape {array.shape}; must contain one value per row")
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    each = (
        values.tolist() if hasattr(values, "tolist") else values
    )  # np.asarray would convert numbers next to words to words
    cells = []
    for value in each:
        text = "" if value is None or value != value else str(value)
        cells.append(text.replace(".", decimal) if isinstance(value, (int, float)) else text)
    return to_object_array(cells)


def _check_header(path: Path, header: Sequence[str], delimiter: str) -> None:
    """Raise UserError if a column name is empty or occurs twice, or if the names are not separated by `delimiter`."""
    other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other:
        remedy = f'set data.delimiter: "{other.encode("unicode_escape").decode()}"'
        raise UserError(
            f"{path}: the column names in the first line are separated by {other!r}, not {delimiter!r}; {remedy}"
        )
    duplicate = next((name for k, name in enumerate(header) if name and name in header[:k]), None)
    if duplicate:
        raise UserError(f"{path}: column {duplicate!r} appears twice in the header; rename one of them")
    if "" in header:
        position = header.index("") + 1
        remedy = "name it, or remove it (for an index column of pandas, use to_csv(..., index=False))"
        raise UserError(f"{path}: column {position} has no name in the header; {remedy}")


# ---- targets ----
@dataclass(frozen=True, eq=False)
class TableTargets:
    """The targets of a table.

    Attributes:
        y: class numbers (n,), or numbers (n,) or (n, k).
        names: the names of the classes; () for numbers.
        outputs: the number of outputs of the model if targets are numbers.
    """

    y: Tensor
    names: tuple[str, ...] = ()
    outputs: int = 1

    @property
    def strata(self) -> np.ndarray:
        """The class of each row for stratified draws, (n,); zeros for numbers."""
        return self.y.numpy() if self.names else np.zeros(len(self.y), dtype=np.int64)


def read_targets(
    rows: Table, label: Sequence[str], target: str, classes: Sequence[str | int | float] | None
) -> TableTargets:
    """Extract the targets from the label columns; missing numbers become NaN if `task.ignore` is nan.

    Args:
        target: class, number, or auto (class or number, depending on the labels).
        classes: the classes, ordered by class number; None: the distinct labels.
    """
    if len(label) > 1 or target == "number" or (target == "auto" and classes is None and missing_targets_allowed()):
        if classes is not None or target == "class":
            raise UserError(
                "table: data.class_names and data.target: class need a single data.label_column with class labels; for "
                "numbers, set data.target: number and remove data.class_names"
            )
        return _read_number_targets(rows, label, len(label) if target == "number" else 1)
    words = rows.parse_words(label[0], "label_column")
    names = distinct_words(words) if classes is None else list(map(normalize_word, classes))
    if len(set(names)) < len(names):
        raise UserError(
            f"table: data.class_names contains a label twice: {', '.join(names)}; list each label only once"
        )
    if target == "auto" and classes is None:
        if _are_quantities(words):
            return _read_number_targets(rows, label, 1)
        if len(names) > max(MAX_GUESSED_CLASSES, len(rows) // 10):
            problem = (
                f"{rows.path}: column {label[0]!r} contains {len(names)} distinct values in {len(rows)} rows, "
                "too many for classes"
            )
            survival = "for the task survival, set data.label_column: [EVENT, TIME]"
            remedy = "set data.target: number for regression, or data.target: class if these are classes"
            raise UserError(f"{problem}; {remedy}; {survival}")
        if len(names) == 1:
            problem = f"{rows.path}: column {label[0]!r} contains only one label, {names[0]!r}"
            raise UserError(f"{problem}; add rows with other labels, or list all labels in data.class_names")
    number = {name: k for k, name in enumerate(names)}
    unknown = next((row for row, word in enumerate(words) if word not in number), None)
    if unknown is not None:
        problem = f"column {label[0]!r} contains the label {words[unknown]!r}, which is not in data.class_names"
        remedy = "add it there, or correct the row"
        raise UserError(f"{rows.row_location(unknown)}: {problem} ({shorten(', '.join(names), 200)}); {remedy}")
    return TableTargets(torch.tensor([number[word] for word in words]), tuple(names))


def _read_number_targets(rows: Table, label: Sequence[str], outputs: int) -> TableTargets:
    """Extract real-valued targets, (n,) or (n, k), from the label columns."""
    y = np.stack([rows.parse_numbers(name, "label_column", truth=len(label) > 1) for name in label], axis=1)
    return TableTargets(torch.from_numpy(y[:, 0] if len(label) == 1 else y).float(), outputs=outputs)


def _are_quantities(words: np.ndarray) -> bool:
    """Return whether labels are quantities to predict, not classes.

    They are if most labels are numbers, and some of these numbers are not integers.
    """
    numeric = [word for word in words if QUANTITY.fullmatch(word)]
    return 2 * len(numeric) > len(words) and not all(map(WHOLE_NUMBER.fullmatch, numeric))
