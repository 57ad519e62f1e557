"""Lines of JSON, and what becomes of numbers that JSON does not know."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmpi.common.errors import UserError


def plain(value: Any) -> Any:
    """What JSON can hold: arrays and tensors as lists, paths as text, NaN and infinities as None.

    >>> plain({"loss": float("nan"), "sizes": np.arange(2)})
    {'loss': None, 'sizes': [0, 1]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of a run; a line that a crash has cut is none. Raises UserError for one that was changed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is no row of a run; it was changed, or the disk is bad")
        rows.append(row)
    return rows


def round_of(line: str) -> float:
    """The round of a line; of half a line, which a crash has left, and of what is none, infinity."""
    try:
        return float(json.loads(line)["round"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def as_line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False)
