"""The targets of a table's rows: class numbers, or numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten
from fedmpi.data.sources.common import gaps_allowed
from fedmpi.data.sources.tables.files import Table, ordered
from fedmpi.data.sources.tables.numerals import WHOLE, spelling

AMOUNT = re.compile(r"[-+]?[0-9.][0-9.,']*([eE][-+]?[0-9]+)?")  # a number, with marks between thousands too
MANY = 100  # classes beyond which a column of whole numbers may well be amounts


@dataclass(frozen=True, eq=False)
class Target:
    """y, (n,) class numbers or (n,) or (n, k) numbers; names of the classes, none for numbers."""

    y: Tensor
    names: tuple[str, ...]
    outputs: int = 1  # of a model, where there are no classes

    @property
    def groups(self) -> np.ndarray:
        """(n,) the class of each row; zeros for numbers."""
        return self.y.numpy() if self.names else np.zeros(len(self.y), dtype=np.int64)


def targets(rows: Table, label: Sequence[str], target: str, classes: Sequence[str | int | float] | None) -> Target:
    """Return the targets in the column or columns `label`. Gaps, where they are allowed, are NaN beside numbers."""
    if target == "auto" and classes is None and gaps_allowed():
        target = "number"
    if len(label) > 1 or target == "number":
        if classes is not None or target == "class":
            raise UserError("table: data.class_names and target: class go with one column, of classes")
        return _numbers(rows, label, target)
    words = rows.words(label[0], "label_column")
    names = ordered(words) if classes is None else list(map(spelling, classes))
    if len(set(names)) < len(names):
        raise UserError(f"table: data.class_names holds a label twice: {', '.join(names)}")
    if target == "auto" and classes is None:
        if _are_amounts(words):
            return _numbers(rows, label, "number")
        if len(names) > max(MANY, len(rows) // 10):
            many = f"{rows.path}: column {label[0]!r} holds {len(names)} labels in {len(rows)} rows"
            survival = "for the task survival name two columns, data.label_column: [EVENT, TIME]"
            raise UserError(f"{many}; say data.target: class, or number for a regression; {survival}")
        if len(names) == 1:
            one = f"{rows.path}: column {label[0]!r} holds one label alone, {names[0]!r}"
            raise UserError(f"{one}; two are needed, or those that there are in data.class_names")
    number = {name: k for k, name in enumerate(names)}
    _check_words(rows, label[0], words, number, "label", "class_names")
    return Target(torch.tensor([number[word] for word in words]), tuple(names))


def _numbers(rows: Table, label: Sequence[str], target: str) -> Target:
    y = np.stack([rows.numbers(name, "label_column", truth=len(label) > 1) for name in label], axis=1)
    if target == "auto" and len(label) == 2:
        _check_survival(rows, label, y)
    outputs = len(label) if target == "number" else 1
    return Target(torch.from_numpy(y[:, 0] if len(label) == 1 else y).float(), (), outputs)


def with_events(rows: Table, column: str, events: Mapping[str, int]) -> Table:
    """Return the table with 1 and 0 in place of the words of the event, and NaN for a gap.

    Raises:
        UserError: a cell that is none of the words, in the spelling of `spelling`.
    """
    words = rows.words(column, "label_column")
    _check_words(rows, column, words, {"": 0, **events}, "event", "event_words")
    numbers = np.array([events[word] if word else np.nan for word in words], dtype=np.float64)
    return replace(rows, columns={**rows.columns, column: numbers})


def _check_words(rows: Table, column: str, words: np.ndarray, known: Mapping[str, int], what: str, key: str) -> None:
    odd = next((row for row, word in enumerate(words) if word not in known), None)
    if odd is not None:
        problem = f"column {column!r} holds the {what} {words[odd]!r}, which is none of data.{key}"
        raise UserError(f"{rows.at(odd)}: {problem}: {shorten(', '.join(filter(None, known)), 200)}")


def _check_survival(rows: Table, label: Sequence[str], y: np.ndarray) -> None:
    """Raise UserError for the first row of y (n, 2), event and time, in which one of them cannot be that."""
    is_event = np.isin(y[:, 0], (0, 1)) | np.isnan(y[:, 0])  # a gap, where gaps are allowed
    bad = np.flatnonzero(~is_event | (y[:, 1] < 0))
    if len(bad):
        event, time = y[bad[0]]
        cells = f"column {label[0]!r} holds the event {event:g}, column {label[1]!r} the time {time:g}"
        raise UserError(
            f"{rows.at(bad[0])}: {cells}; of the task survival, data.label_column: [EVENT, TIME], an event is 1 or "
            "true (seen), or 0 or false (censored), or a word of data.event_words, and no time is below 0; "
            "data.target: number is for two numbers"
        )


def _are_amounts(words: np.ndarray) -> bool:
    """Return whether most words look like numbers, not all of them whole: then a word that is none is a mistake."""
    different, counts = np.unique(words, return_counts=True)
    numeric = np.array([AMOUNT.fullmatch(word) is not None for word in different])
    all_whole = all(WHOLE.fullmatch(word) for word in different[numeric])
    return not all_whole and bool(2 * counts[numeric].sum() > len(words))
