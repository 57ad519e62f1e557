"""What is written as JSON, and what becomes of numbers that JSON does not know."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


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


def as_line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False)
