"""The targets of a table's rows: class numbers, or numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import near_duplicates, shorten
from fedmpi.data.sources.common import gaps_allowed
from fedmpi.data.sources.tables.files import Table, ordered
from fedmpi.data.sources.tables.numerals import is_number, is_written_number, spelling

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
        """Return the targets of some rows, by their numbers."""
        return replace(self, y=self.y[torch.from_numpy(rows)])


def targets(rows: Table, label: Sequence[str], target: str, classes: Sequence[str | int | float] | None) -> Target:
    """Return the targets in the column or columns `label`. Gaps, where they are allowed, are NaN beside numbers."""
    if target == "auto" and classes is None and gaps_allowed():
        target = "number"
    if len(label) > 1 or target == "number":
        if classes is not None or target == "class":
            raise UserError("table: data.class_names and target: class go with one column, of classes")
        return _numbers(rows, label, target)
    words = rows.words(label[0], "label_column")
    names = ordered(list(words))
    if classes is not None:
        names = [spelling(value) for value in classes]
        if len(set(names)) < len(names):
            raise UserError(f"table: data.class_names holds a label twice: {', '.join(names)}")
    elif target == "auto":
        if _are_amounts(words):
            return _numbers(rows, label, "number")
        if len(names) > max(MANY, len(rows) // 10):
            many = f"{rows.path}: column {label[0]!r} holds {len(names)} labels in {len(rows)} rows"
            survival = "for the task survival name two columns, data.label_column: [EVENT, TIME]"
            raise UserError(f"{many}; say data.target: class, or number for a regression; {survival}")
        _check_labels(rows, label[0], words, names)
    number = {name: k for k, name in enumerate(names)}
    odd = next((row for row, word in enumerate(words) if word not in number), None)
    if odd is not None:
        problem = f"column {label[0]!r} holds the label {words[odd]!r}, which is none of data.class_names"
        raise UserError(f"{rows.at(odd)}: {problem}: {shorten(', '.join(names), 200)}")
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
    odd = next((row for row, word in enumerate(words) if word and word not in events), None)
    if odd is not None:
        problem = f"column {column!r} holds the event {words[odd]!r}, which is none of data.event_words"
        raise UserError(f"{rows.at(odd)}: {problem}: {shorten(', '.join(events), 200)}")
    numbers = np.array([events[word] if word else np.nan for word in words], dtype=np.float64)
    return replace(rows, columns={**rows.columns, column: numbers})


def _check_survival(rows: Table, label: Sequence[str], y: np.ndarray) -> None:
    """Raise UserError for the first row of y (n, 2), event and time, in which one of them cannot be that."""
    is_event = np.isin(y[:, 0], (0, 1)) | np.isnan(y[:, 0])  # a gap, where gaps are allowed
    bad = np.flatnonzero(~is_event | (y[:, 1] < 0))
    if not len(bad):
        return
    row, (event, time) = int(bad[0]), y[bad[0]].tolist()
    if not is_event[row]:
        raise UserError(
            f"{rows.at(row)}: column {label[0]!r} holds the event {event:g}; 1 or true (seen), or 0 or false "
            "(censored), is needed; two label columns are event and time, for the task survival: data.label_column: "
            f"[{label[1]}, {label[0]}] if they are in the other order, data.event_words: {{1: 0, 2: 1}}, say, if other "
            "numbers mean that, data.target: number for two numbers"
        )
    raise UserError(
        f"{rows.at(row)}: column {label[1]!r} holds the time {time:g}; no time is below 0; if the sign marks who is "
        f"censored, write 0 into column {label[0]!r} there, and the time without its sign"
    )


def _are_amounts(words: np.ndarray) -> bool:
    """Return whether most words are numbers, not all of them whole: then a word that is no number is a mistake."""
    different, counts = np.unique(words, return_counts=True)
    numeric = np.array([is_written_number(word) for word in different])
    fractions = (not (is_number(word) and float(word).is_integer()) for word in different[numeric])
    return bool(2 * counts[numeric].sum() > len(words)) and any(fractions)


def _check_labels(rows: Table, label: str, words: np.ndarray, names: Sequence[str]) -> None:
    """Raise UserError for one label alone, and for two of which one seems to be a slip."""
    if len(names) == 1:
        problem = f"column {label!r} holds one label alone, {names[0]!r}"
        raise UserError(f"{rows.path}: {problem}; two are needed, or those that there are in data.class_names")
    twice = near_duplicates(dict.fromkeys(words))
    if twice:
        first, last = (rows.at(int(np.flatnonzero(words == name)[0])) for name in twice)
        problem = f"{last}: column {label!r} holds the label {twice[1]!r}, and in {first} {twice[0]!r}"
        raise UserError(f"{problem}; are they one? mend it, or name the labels in data.class_names")
