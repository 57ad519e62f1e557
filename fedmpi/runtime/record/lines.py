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
    """The rows of a faults.jsonl or placement.jsonl; a line that a crash has cut is none. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        what = "placement" if path.name.startswith("placement") else "losses"
        raise UserError(f"{path}: the {what} of a run cannot be read ({error})") from error


def round_of(line: str) -> float:
    """The round of a line; of half a line, which a crash has left, infinity."""
    try:
        return float(json.loads(line)["round"])
    except ValueError:
        return math.inf


def as_line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False)
