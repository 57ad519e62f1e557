"""How texts by author become windows of symbols: x (n, L), and y (n, L), the symbol after each of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, shorten, show
from fedmpi.data.dataset import Dataset
from fedmpi.data.preparation import NewRows, Preparation, Request, file_of
from fedmpi.data.sources.text_files import Text, texts_of

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


def windows(
    texts: Mapping[str, Text],
    context: int,
    test_fraction: float,
    min_chars: int | None,
    alphabet: str | None,
    tests: Mapping[str, Text] | None = None,
) -> Dataset:
    """The data set of several authors, who are its sites; only the first 1 - test_fraction of a text is trained on.

    A part of n characters is cut into floor((n - 1) / context) windows, one after the other; what is left over at its
    end, less than a window, is left out. Raises UserError for an author whose training part is shorter than a window
    and the character after it, and tells of those whose test part is; with min_chars those with fewer characters than
    that are left out first. tests: the test part of each author, of whose text all is trained on then.
    """
    known = {name: text for name, text in texts.items() if len(text.text) >= (min_chars or 0)}
    if not known:
        raise UserError(f"data.min_chars: {min_chars}: no author of {len(texts)} has so many characters; lower it")
    parts = {
        name: _train_and_test(name, text, context, 0 if tests is not None else test_fraction)
        for name, text in known.items()
    }
    if tests is not None:
        parts = {name: (text, tests[name].text if name in tests else "") for name, (text, _) in parts.items()}
        strangers = [name for name in tests if name not in texts]
        if strangers:
            who = shorten(", ".join(strangers))
            warnings.warn(f"data.test_path: not read: {who}, for none of their texts is trained on", stacklevel=3)
    symbols = alphabet or "".join(sorted({*"".join(first for first, _ in parts.values())}))
    if alphabet is None:
        strange = {*"".join(last for _, last in parts.values())} - {*symbols}
        symbols += UNKNOWN if strange and UNKNOWN not in symbols else ""
    else:
        _check_texts(known, alphabet)
        _check_texts({name: tests[name] for name in known if name in tests} if tests else {}, alphabet)
    if test_fraction or tests is not None:
        _warn_of_untested_authors(parts, context)
    number = {symbol: k for k, symbol in enumerate(symbols)}
    train = [cut(first, number, context) for first, _ in parts.values()]
    test = [cut(last, number, context) for _, last in parts.values()]
    return Dataset(
        *_pairs(train),
        *_pairs(test),
        classes=len(symbols),
        site=torch.repeat_interleave(torch.tensor([len(rows) for rows in train])),
        test_site=torch.repeat_interleave(torch.tensor([len(rows) for rows in test])),
        site_names=tuple(known),
        meaning=tuple(symbols),
        preparation=TextPreparation(tuple(symbols), context, closed=alphabet is not None),
    )


def _train_and_test(name: str, text: Text, context: int, test_fraction: float) -> tuple[str, str]:
    """Divide the text of an author into its training and its test part."""
    cut = len(text.text) - int(test_fraction * len(text.text))
    if cut < context + 1:
        said = f"author {name!r} has {count(cut, 'character')} to train on, of {len(text.text)}"
        raise UserError(
            f"{text.place}: {said}; data.context = {context} needs {context + 1}: lower it, or leave short authors out "
            "with data.min_chars"
        )
    return text.text[:cut], text.text[cut:]


def _warn_of_untested_authors(parts: Mapping[str, tuple[str, str]], context: int) -> None:
    short = [f"{name!r} ({len(last)})" for name, (_, last) in parts.items() if len(last) < context + 1]
    if short:
        whose = f"{'authors' if len(short) > 1 else 'author'} {shorten(', '.join(short))}"
        needed = f"data.context = {context} needs {context + 1} characters in the test part"
        warnings.warn(
            f"data: no test row of {whose}: {needed}; lower it, raise data.test_fraction, or leave short authors out "
            "with data.min_chars",
            stacklevel=4,
        )


def check_alphabet(alphabet: str) -> None:
    """Raise UserError for a character that stands twice in data.alphabet."""
    twice = [symbol for k, symbol in enumerate(alphabet) if symbol in alphabet[:k]]
    if twice:
        raise UserError(f"data.alphabet holds {show(twice[0])} twice; each character stands once")


def _check_texts(texts: Mapping[str, Text], alphabet: str) -> None:
    check_alphabet(alphabet)
    for name, text in texts.items():
        strange = {*text.text} - {*alphabet}
        if strange:
            at = min(text.text.index(symbol) for symbol in strange)
            said = f"character {at + 1} of author {name!r} is {show(text.text[at])}"
            raise UserError(f"{text.place}: {said}, which is not in data.alphabet; add it there, or mend the text")


def _pairs(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    both = torch.cat(list(rows))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
