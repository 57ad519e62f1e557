"""Rows of a CSV file with a header, each with its line for messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten
from fedmpi.data.csv_file import csv_table


class Row(NamedTuple):
    at: str  # "a.csv, line 7"
    values: dict[str, str]  # of the columns asked for; none is empty


def rows(path: Path, columns: Sequence[str], delimiter: str = ",", options: Sequence[str] = ()) -> list[Row]:
    """Rows of `path` with the values of `columns`, spaces around them left out.

    options: the keys of the config that name the columns, for messages.
    Raises UserError, with the line, for a file that cannot be read, a column that is not there, a gap in one.
    """
    header, lines = csv_table(path, delimiter, lambda names: _check_header(path, names, columns, delimiter, options))
    places = {name: header.index(name) for name in columns}
    found = []
    for number, line in lines:
        at = f"{path}, line {number}"
        values = {name: line[place].strip() for name, place in places.items()}
        gap = next((name for name, value in values.items() if not value), None)
        if gap is not None:
            raise UserError(f"{at}: the column {gap!r} is empty; fill it, or leave the row out")
        found.append(Row(at, values))
    if not found:
        raise UserError(f"{path} holds no row below its header")
    return found


def _check_header(
    path: Path, header: Sequence[str], columns: Sequence[str], delimiter: str, options: Sequence[str]
) -> None:
    for k, name in enumerate(columns):
        if name not in header:
            other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
            hint = f"; is the delimiter {other!r}? data.delimiter" if len(header) == 1 and other else ""
            key = f" (data.{options[k]})" if options else ""
            there = shorten(", ".join(header), 200)
            meant = next((f"; did you mean {other!r}?" for other in header if other.casefold() == name.casefold()), "")
            raise UserError(f"{path} has no column {name!r}{key}; it has {there}{hint}{meant}")
        if header.count(name) > 1:
            raise UserError(f"{path} has the column {name!r} twice; rename one")
