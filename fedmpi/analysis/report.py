"""The output of an analysis: a table on the console, and its numbers in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable


def folder(to: Path, option: str = "--to") -> Path:
    """Create the directory to write to, before the work begins. Raises UserError if that is not possible."""
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: cannot create {to}: {error.strerror}; choose another directory") from error
    if not os.access(to, os.W_OK):
        raise UserError(f"{option}: {to} cannot be written to; choose another directory")
    return to


def write(path: Path, facts: Mapping[str, Any]) -> Path:
    """The facts as JSON; numbers that are not finite are null."""
    path.write_text(json.dumps(to_jsonable(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def cell(value: object) -> str:
    """A number for people: whole ones with commas, others to four digits.

    >>> cell(12345678), cell(0.123456), cell(float("nan")), cell("runs/a")
    ('12,345,678', '0.1235', '-', 'runs/a')
    """
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(rows: Sequence[Sequence[object]], widths: Sequence[int] | None = None) -> list[str]:
    """Lines of a table, the first column aligned left, the others right; `widths` of columns default to what they need.

    >>> table([("run", "up"), ("a", 1000)])
    ['run     up', 'a    1,000']
    """
    cells = [[cell(value) for value in row] for row in rows]
    first, *others = widths or [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(first), *(text.rjust(w) for text, w in zip(row[1:], others, strict=True))]).rstrip()
        for row in cells
    ]
