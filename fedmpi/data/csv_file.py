"""Read CSV files row by row with line numbers, or column by column in a form that needs little memory."""

from __future__ import annotations

import csv
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten_repr

CELLS_PER_BLOCK = 200_000  # number of cells that are in memory as Python strings at once
MAX_BYTES_PER_CELL = 24  # columns of ASCII cells of at most this length are stored as bytes
OTHER_FORMATS = {".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers", ".json", ".jsonl", ".ndjson"}


def check_is_csv(path: Path) -> None:
    """Raise UserError if the file name has the suffix of another format."""
    if path.suffix.lower() in OTHER_FORMATS:
        raise UserError(
            f"{path} is not a CSV file; export it as CSV in UTF-8 from the program that wrote it, or with pandas.to_csv"
        )


def iter_csv_rows(
    path: Path, delimiter: str = ",", remedy: str = "save it as CSV in UTF-8"
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) for each row of a CSV file.

    A row that spans several lines has the number of its last line. A byte-order mark, a first line `sep=...` as written
    by Excel, and rows with only blank cells are skipped.

    Args:
        delimiter: the character between cells.
        remedy: what a user can do if the file cannot be read, for the message.

    Raises:
        UserError: the file cannot be read as CSV in UTF-8.
    """
    check_is_csv(path)
    csv.field_size_limit(sys.maxsize)  # Python's default limit is 131,072 characters per cell
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for number, row in enumerate(reader):
                line = reader.line_num
                if "\0" in "".join(row):
                    raise csv.Error("it contains the control character '\\x00', as files in UTF-16 do")
                is_note = number == 0 and bool(row) and row[0].startswith("sep=")
                if any(map(str.strip, row)) and not is_note:
                    yield line, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        where = f", after line {line}" if line else ""
        raise UserError(f"{path} cannot be read as CSV in UTF-8{where}: {error}; {remedy}") from error


def read_csv_table(
    path: Path, delimiter: str, check_header: Callable[[Sequence[str]], None], remedy: str = "save it as CSV in UTF-8"
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the column names in the first row, and an iterator over the other rows as (line number, cells).

    Args:
        delimiter: the character between cells.
        check_header: called with the names before any other row is read; it may raise UserError.
        remedy: what a user can do if the file cannot be read, for the message.

    Raises:
        UserError: the file is empty or cannot be read. The iterator also raises it for a row with too few or too many
            cells.
    """
    rows = iter_csv_rows(path, delimiter, remedy)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    if not header:
        raise UserError(f"{path} is empty; its first line must contain the column names")
    check_header(header)

    def checked_rows() -> Iterator[tuple[int, list[str]]]:
        for line, row in rows:
            if len(row) != len(header):
                cells = "cell" if len(row) == 1 else "cells"
                counts = f"has {len(row)} {cells}, but the header has {len(header)}"
                quotes = f"put cells that contain {delimiter!r} in quotes"
                remedy = quotes if len(row) > len(header) else "add the missing cells"
                content = shorten_repr(delimiter.join(row))
                raise UserError(f"{path}, line {line}: the row {content} {counts}; {remedy}")
            yield line, row

    return header, checked_rows()


def read_csv_columns(
    path: Path, delimiter: str, check_header: Callable[[Sequence[str]], None]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Read a CSV file column by column.

    Args:
        delimiter: the character between cells.
        check_header: called with the column names before any row is read; it may raise UserError.

    Returns:
        The columns by name, (n,) each, and the line number of each row, (n,). A column of short ASCII cells is returned
        as bytes, which avoids the overhead of about 50 bytes per Python string; other columns contain str objects.
    """
    header, rows = read_csv_table(path, delimiter, check_header)
    parts: list[list[np.ndarray]] = [[] for _ in header]
    lines = array("q")
    while block := list(islice(rows, max(CELLS_PER_BLOCK // len(header), 1))):
        lines.extend(line for line, _ in block)
        for part, cells in zip(parts, zip(*(row for _, row in block), strict=True), strict=True):
            is_short = max(map(len, cells)) <= MAX_BYTES_PER_CELL and all(map(str.isascii, cells))
            part.append(np.array(cells, dtype="S") if is_short else to_object_array(cells))
    columns = {}
    for name in header:
        own = parts.pop(0)  # frees the parts of a column after their concatenation
        is_bytes = bool(own) and all(part.dtype != object for part in own)
        columns[name] = (
            np.concatenate(own) if is_bytes else to_object_array([cell for part in own for cell in decode_cells(part)])
        )
    return columns, np.array(lines, dtype=np.int64)


def decode_cells(cells: np.ndarray) -> np.ndarray:
    """Convert a column of bytes to str objects, (n,); return any other column unchanged."""
    return to_object_array([cell.decode("ascii") for cell in cells.tolist()]) if cells.dtype.kind == "S" else cells


def to_object_array(cells: Sequence[str]) -> np.ndarray:
    """Convert cells to an array of str objects, (n,), in which equal cells share one object."""
    strings: dict[str, str] = {}
    out = np.empty(len(cells), dtype=object)
    out[:] = [strings.setdefault(cell, cell) for cell in cells]
    return out
