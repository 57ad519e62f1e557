"""Read files with one JSON object per line, such as metrics.jsonl, which may be growing, truncated or damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError


@dataclass(frozen=True)
class JsonLines:
    """The content of a file with one JSON object per line.

    Attributes:
        rows: the objects, in order.
        damaged_lines: line numbers, counted from 1, of lines that are not valid rows.
        is_truncated: whether the last line has no line feed, because it is being written or the writer was killed.
            That line is in neither list.
    """

    rows: list[dict[str, Any]]
    damaged_lines: list[int]
    is_truncated: bool


def parse_jsonl(text: bytes, *, need_round: bool = False) -> JsonLines:
    """Parse the content of a file with one JSON object per line; empty lines are skipped.

    Args:
        need_round: whether each row must have an integer `round`; an object without it is counted as damaged.
    """
    rows, damaged, end = list[dict[str, Any]](), list[int](), text.rfind(b"\n") + 1
    for number, line in enumerate(text[:end].split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError, too
            row = None
        if isinstance(row, dict) and (not need_round or isinstance(row.get("round"), int)):
            rows.append(row)
        else:
            damaged.append(number)
    return JsonLines(rows, damaged, end < len(text))


def read_jsonl(
    path: Path, *, need_round: bool = False, strict: bool = False, tail_bytes: int | None = None
) -> JsonLines:
    """Read a file with one JSON object per line; a missing file has no rows.

    Args:
        need_round: as in `parse_jsonl`.
        strict: whether a damaged line is an error. Otherwise the caller must check `damaged_lines`.
        tail_bytes: number of bytes to read at the end of the file. A line that begins earlier is skipped, and lines are
            numbered from the first line read. None: read the whole file.

    Raises:
        UserError: if the file cannot be read, or if `strict` is set and a line is damaged.
    """
    try:
        with path.open("rb") as file:
            skipped = 0 if tail_bytes is None else max(file.seek(0, 2) - tail_bytes, 0)
            file.seek(skipped)
            text = file.read()
    except FileNotFoundError:
        return JsonLines([], [], False)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    content = parse_jsonl(text[text.find(b"\n") + 1 :] if skipped else text, need_round=need_round)
    if strict and content.damaged_lines:
        raise UserError(
            f"{path}:{content.damaged_lines[0]}: this line is not a valid row; the file was changed, or the disk is "
            "faulty"
        )
    return content


def to_jsonable(value: Any) -> Any:
    """Convert a value to types that JSON supports: arrays and tensors to lists, paths to strings, NaN and inf to None.

    >>> from pathlib import Path
    >>> to_jsonable({"loss": float("nan"), "sizes": (1, 2), "file": Path("a.csv")})
    {'loss': None, 'sizes': [1, 2], 'file': 'a.csv'}
    """
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return to_jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)
