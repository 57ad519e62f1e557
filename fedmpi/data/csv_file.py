"""Read CSV files, for all sources: rows with their line numbers, or columns that take little memory."""

from __future__ import annotations

import csv
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten

BLOCK = 200_000  # cells that are held as Python's strings at a time
SHORT = 24  # characters of cells that are held as bytes, all of a column in the width of its longest
OFFICE = {".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"}
JSON = {".json", ".jsonl", ".ndjson"}


def check_is_csv(path: Path) -> None:
    """Raise UserError for a file whose name says that it is of another format."""
    kind = path.suffix.lower()
    if kind in OFFICE:
        raise UserError(f"{path} is a spreadsheet program's own file; save it from there as CSV in UTF-8")
    if kind in JSON:
        lines = "" if kind == ".json" else ", lines=True"
        raise UserError(
            f"{path} is JSON, and a table is read from CSV or Parquet; write it as one of them: "
            f"pandas.read_json({path.name!r}{lines}).to_csv({path.stem + '.csv'!r}, index=False)"
        )


def csv_rows(path: Path, delimiter: str = ",", remedy: str = "save it anew as that") -> Iterator[tuple[int, list[str]]]:
    """Yield each row of a CSV file with the number of its last line. Cells may be of any length.

    The byte-order mark and the line `sep=` that Excel writes are left out, and so are rows of blank cells.

    Raises:
        UserError: the file cannot be read as CSV in UTF-8.
    """
    check_is_csv(path)
    csv.field_size_limit(sys.maxsize)  # Python's own limit is 131,072 characters a cell
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_without_nul(path, file), delimiter=delimiter, strict=True)
            for number, row in enumerate(reader):
                if number == 0 and row and row[0].startswith("sep="):
                    continue
                if any(map(str.strip, row)):
                    yield reader.line_num, row
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; correct its path or its permissions") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {_encoding(path, error, remedy)}") from error
    except csv.Error as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {error}; {remedy}") from error


def _encoding(path: Path, error: UnicodeDecodeError, remedy: str) -> str:
    """Name the line of the first byte that is not UTF-8, and the encoding that the file seems to have."""
    content = path.read_bytes()
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError as in_file:  # the other one counts from the beginning of a block
        error = in_file
    line = content[: error.start].count(b"\n") + 1
    where = f"line {line} holds the byte 0x{error.object[error.start]:02x}"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"{where}; it looks like UTF-16; {remedy}"
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return f"{where}; {remedy}"
    return f"{where}; it looks like Windows-1252: in Excel save it as CSV UTF-8, or else {remedy}"


def csv_table(
    path: Path, delimiter: str, check_header: Callable[[Sequence[str]], None], remedy: str = "save it anew as that"
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of the columns in the first row, and an iterator over the other rows, which are all as long.

    Args:
        check_header: called with the names before any other row is read; it may raise UserError.
    """
    rows = csv_rows(path, delimiter, remedy)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    if not header:
        raise UserError(f"{path} is empty; the names of the columns are needed in its first line")
    check_header(header)
    return header, _checked(path, rows, len(header), delimiter)


def _checked(
    path: Path, rows: Iterator[tuple[int, list[str]]], length: int, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    for line, row in rows:
        if len(row) != length:
            quotes = f" (a cell that holds {delimiter!r} stands in quotes)" if len(row) > length else ""
            counts = f"{len(row)} cells, the header has {length}{quotes}"
            raise UserError(f"{path}, line {line}: {counts}: {shorten(delimiter.join(row))}")
        yield line, row


def csv_columns(
    path: Path, delimiter: str, check_header: Callable[[Sequence[str]], None]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Read a CSV file by columns.

    Returns:
        The columns by name, each (n,) of bytes where its cells are short and in ASCII, else of objects (str); and (n,)
        the line of each row. A string of Python takes 50 bytes more than its characters.
    """
    header, rows = csv_table(path, delimiter, check_header)
    parts: list[list[np.ndarray]] = [[] for _ in header]
    lines = array("q")
    while block := list(islice(rows, max(BLOCK // len(header), 1))):
        lines.extend(line for line, _ in block)
        for part, cells in zip(parts, zip(*(row for _, row in block), strict=True), strict=True):
            part.append(_packed(cells))
    columns = {}
    for name in header:
        columns[name] = _joined(parts.pop(0))  # no longer in memory twice
    return columns, np.array(lines, dtype=np.int64)


def text_of(cells: np.ndarray) -> np.ndarray:
    """Return a column of bytes as (n,) objects (str); other columns as they are."""
    if cells.dtype.kind != "S":
        return cells
    out = np.empty(len(cells), dtype=object)
    out[:] = [cell.decode("ascii") for cell in cells.tolist()]
    return out


def _packed(cells: Sequence[str]) -> np.ndarray:
    if max(map(len, cells)) <= SHORT:
        try:
            return np.array(cells, dtype="S")
        except UnicodeEncodeError:
            pass
    return _interned(cells)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if parts and all(part.dtype != object for part in parts):
        return np.concatenate(parts)
    return _interned([cell for part in parts for cell in text_of(part)])


def _interned(cells: Sequence[str]) -> np.ndarray:
    """Return (n,) objects, in which equal cells are one string."""
    strings: dict[str, str] = {}
    out = np.empty(len(cells), dtype=object)
    out[:] = [strings.setdefault(cell, cell) for cell in cells]
    return out


def _without_nul(path: Path, file: TextIO) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise UserError(
                f"{path}, line {number} holds the control character '\\x00', as a file that is no text does, or one in "
                "UTF-16; save it anew as CSV in UTF-8"
            )
        yield line
