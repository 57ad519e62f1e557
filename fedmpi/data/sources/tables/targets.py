"""What a table's rows are to be told: class numbers, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import near_duplicates, shorten
from fedmpi.data.sources.common import gaps_allowed
from fedmpi.data.sources.tables.files import Table, ordered, spelling
from fedmpi.data.sources.tables.numerals import is_number, is_written_number

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

    def keep(self, rows: np.ndarray) -> Target:
        return Target(self.y[torch.from_numpy(rows)], self.names, self.outputs)


def targets(rows: Table, label: Sequence[str], target: str, classes: Sequence[str | int | float] | None) -> Target:
    """The targets in the column or columns `label`. Gaps, where they are allowed, are NaN, and targets are numbers."""
    if target == "auto" and classes is None and gaps_allowed():
        target = "number"
    if len(label) > 1 or target == "number":
        if classes is not None or target == "class":
            raise UserError("table: data.class_names and target: class go with one column, of classes")
        y = np.stack([rows.numbers(name, "label_column", truth=len(label) > 1) for name in label], axis=1)
        outputs = len(label) if target == "number" else 1
        if target == "auto" and len(label) == 2:
            _check_survival(rows, label, y)
        return Target(torch.from_numpy(y[:, 0] if len(label) == 1 else y).float(), (), outputs)
    words = rows.words(label[0], "label_column")
    found = ordered(list(words))
    if target == "auto" and classes is None:
        if _amounts(words):
            return targets(rows, label, "number", None)
        if len(found) > max(MANY, len(rows) // 10):
            many = f"{rows.path}: column {label[0]!r} holds {len(found)} labels in {len(rows)} rows"
            survival = "for the task survival name two columns, data.label_column: [EVENT, TIME]"
            raise UserError(f"{many}; say data.target: class, or number for a regression; {survival}")
        _check_labels(rows, label[0], words, found)
    names = found
    if classes is not None:
        names = [spelling(value) for value in classes]
        if len(set(names)) < len(names):
            raise UserError(f"table: data.class_names holds a label twice: {', '.join(names)}")
    number = {name: k for k, name in enumerate(names)}
    for row, word in enumerate(words):
        if word not in number:
            allowed = shorten(", ".join(names), 200)
            said = f"column {label[0]!r} holds the label {word!r}, which is none of data.class_names"
            raise UserError(f"{rows.at(row)}: {said}: {allowed}")
    return Target(torch.tensor([number[word] for word in words]), tuple(names))


def _check_survival(rows: Table, label: Sequence[str], y: np.ndarray) -> None:
    """Raise UserError for the first row of y (n, 2), event and time, in which one of them cannot be that."""
    is_event = np.isin(y[:, 0], (0, 1)) | np.isnan(y[:, 0])  # a gap, where gaps are allowed
    bad = np.flatnonzero(~is_event | (y[:, 1] < 0))
    if not len(bad):
        return
    row, (event, time) = int(bad[0]), (float(value) for value in y[bad[0]])
    order = f"two label columns are event and time, for the task survival: data.label_column: [{label[1]}, {label[0]}]"
    if not is_event[row]:
        odd = f"column {label[0]!r} holds the event {event:g}; 1 or true (seen), or 0 or false (censored), is needed"
        raise UserError(
            f"{rows.at(row)}: {odd}; {order} if they are in the other order, data.event_words: {{1: 0, 2: 1}}, say, if "
            "other numbers mean that, data.target: number for two numbers"
        )
    odd = f"column {label[1]!r} holds the time {time:g}; no time is below 0"
    remedy = f"if the sign marks who is censored, write 0 into column {label[0]!r} there, and the time without its sign"
    raise UserError(f"{rows.at(row)}: {odd}; {remedy}")


def _amounts(words: np.ndarray) -> bool:
    """Whether most words are numbers, and some of these no whole ones: then one that is no number is a mistake."""
    numbers = [word for word in words if is_written_number(word)]
    whole = (is_number(word) and float(word).is_integer() for word in numbers)
    return 2 * len(numbers) > len(words) and not all(whole)


def _check_labels(rows: Table, label: str, words: np.ndarray, found: Sequence[str]) -> None:
    """UserError for one label alone, and for two that a slip tells apart."""
    if len(found) == 1:
        what = f"column {label!r} holds one label alone, {found[0]!r}"
        raise UserError(f"{rows.path}: {what}; two are needed, or those that there are in data.class_names")
    twice = near_duplicates(dict.fromkeys(words))
    if twice:
        first, last = (rows.at(int(np.flatnonzero(words == name)[0])) for name in twice)
        said = f"{last}: column {label!r} holds the label {twice[1]!r}, and in {first} {twice[0]!r}"
        raise UserError(f"{said}; are they one? mend it, or name the labels in data.class_names")
