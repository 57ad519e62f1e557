"""How texts become windows of symbols, those of the training and new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import show
from fedmpi.data.preparation import NewRows, Preparation, Request, file_of
from fedmpi.data.sources.texts.reading import Text, texts_of

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for what occurs in test parts alone
SKIP = -100  # a target that does not count: the one of the task next_symbol


@dataclass(frozen=True)
class TextPreparation(Preparation):
    """The characters in the order of their numbers, and the length of a window.

    closed: the config names the alphabet, and other characters are refused; else they are as those are that occurred in
    test parts alone, if there were some. last: of the targets of a window the one behind its end alone counts.
    """

    alphabet: tuple[str, ...]
    context: int
    closed: bool = False
    author_column: str = "author"
    text_column: str = "text"
    delimiter: str = ","
    last: bool = False

    kind: ClassVar[str] = "texts"

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.alphabet

    def read(self, request: Request) -> NewRows:
        """Each text in windows, one after the other, as in training, and its last characters, behind which the next one
        is not known. Targets are those of the windows: the last one of a text counts in no metric."""
        if isinstance(request.rows, str) and "\n" in request.rows:
            texts: Mapping[str, Text] = {"text": Text(request.rows, "rows")}
        else:
            texts = texts_of(file_of(request, folder=True), self.author_column, self.text_column, self.delimiter)
        number = {symbol: k for k, symbol in enumerate(self.alphabet)}
        names, starts, parts, ends = [], [], [], []
        for name, text in texts.items():
            self._check(name, text)
            windows = cut(text.text, number, self.context)
            last = symbols(text.text[-self.context :], number)
            parts += [windows[:, :-1], last[None]]
            targets = windows[:, 1:].clone()
            targets[:, : -1 if self.last else 0] = SKIP
            ends += [targets, torch.full((1, self.context), SKIP)]
            names += [name] * (len(windows) + 1)
            starts += [*(k * self.context + 1 for k in range(len(windows))), len(text.text) - self.context + 1]
        ids = {"text": np.array(names, dtype=object), "character": np.array(starts)}
        return NewRows(ids, torch.cat(parts), torch.cat(ends))

    def _check(self, name: str, text: Text) -> None:
        if len(text.text) < self.context:
            few = f"text {name!r} has {len(text.text)} characters"
            raise UserError(f"{text.place}: {few}; the model was trained on windows of {self.context}")
        strange = {*text.text} - {*self.alphabet}
        if strange and (self.closed or UNKNOWN not in self.alphabet):
            at = min(text.text.index(symbol) for symbol in strange)
            said = f"character {at + 1} of {name!r} is {show(text.text[at])}"
            raise UserError(f"{text.place}: {said}, which the training did not have; replace it")


def symbols(text: str, number: Mapping[str, int]) -> Tensor:
    """(n,) int64 numbers of a text's characters."""
    unknown = number.get(UNKNOWN, 0)
    return torch.from_numpy(np.fromiter((number.get(symbol, unknown) for symbol in text), np.int64, len(text)))


def cut(text: str, number: Mapping[str, int], context: int) -> Tensor:
    """(windows, context + 1) int64: windows one after the other, each with the symbol behind it."""
    found = symbols(text, number)
    return found.unfold(0, context + 1, context) if len(text) > context else found.new_empty(0, context + 1)
