"""Codes in a table's cells: values that stand for a gap, and words of an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten
from fedmpi.data.sources.tables import numerals
from fedmpi.data.sources.tables.files import Table, spelling

Value = str | int | float
EVERY = ""  # the column's name under which values of all columns stand


def missing_by_column(given: Sequence[Value] | Mapping[str, Sequence[Value]] | None) -> dict[str, tuple[str, ...]]:
    """data.missing_values by column, in one spelling; a list is of all columns, under EVERY."""
    by_column = given if isinstance(given, Mapping) else {EVERY: given or ()}
    return {name: tuple(map(spelling, values)) for name, values in by_column.items() if values}


def with_gaps(rows: Table, missing: Mapping[str, Sequence[str]]) -> Table:
    """The table with an empty cell (NaN) for each value that `missing` names, unless the column names it as a value."""
    for name in missing:
        if name != EVERY:
            rows.column(name, "missing_values")
    columns = dict(rows.columns)
    for name, cells in rows.columns.items():
        words = {*missing.get(EVERY, ()), *missing.get(name, ())} - {*rows.named.get(name, ())}
        if words and cells.dtype == np.float64:
            numbers = [float(word) for word in words if numerals.is_number(word)]
            columns[name] = np.where(np.isin(cells, numbers), np.nan, cells)
        elif words:
            empty = b"" if cells.dtype != object else ""
            coded = [cell for cell in {*cells.tolist()} if _word(rows, cell) in words]
            columns[name] = np.where(np.isin(cells, coded), empty, cells) if coded else cells
    return replace(rows, columns=columns, coded=bool(missing))


def _word(rows: Table, cell: str | bytes) -> str:
    text = cell if isinstance(cell, str) else cell.decode("ascii")
    return spelling(numerals.plain(text, rows.decimal, rows.thousands))


def with_events(rows: Table, column: str, events: Mapping[str, int]) -> Table:
    """The table with 1 and 0 in place of the words of the event, and NaN for a gap.

    Raises:
        UserError: a cell that is none of the words, in the spelling of `spelling`.
    """
    words = rows.words(column, "label_column")
    odd = next((row for row, word in enumerate(words) if word and word not in events), None)
    if odd is not None:
        named = shorten(", ".join(events), 200)
        said = f"column {column!r} holds the event {words[odd]!r}, which is none of data.event_words"
        raise UserError(f"{rows.at(odd)}: {said}: {named}")
    numbers = np.array([events[word] if word else np.nan for word in words], dtype=np.float64)
    return replace(rows, columns={**rows.columns, column: numbers})
