"""Strings of LEAF's data sets as symbols, sequences of words and counts of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import show
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.text_windows import UNKNOWN, TextPreparation, check_alphabet

WORD = re.compile(r"[\w']+|[.,!?;]")  # LEAF, models/utils/language_utils.py
END, OTHER, FIRST = 0, 1, 2  # numbers of words in a sequence
UNUSED = -100  # a target that does not count, tasks/next_symbol.py


def code_points(x: Sequence[Any], y: Sequence[Any], at: str) -> np.ndarray:
    """(n, L + 1) uint32: the characters of each string of x and the one after them."""
    for k, (text, after) in enumerate(zip(x, y, strict=True)):
        good = isinstance(text, str) and isinstance(after, str) and len(after) == 1 and len(text) == len(x[0]) > 0
        if not good:
            raise UserError(
                f"{at}, sample {k}: x is {show(text)}, y is {show(after)}; a string of {len(x[0])} characters, as in "
                "sample 0, and the one that follows are needed"
            )
    text = "".join(part for pair in zip(x, y, strict=True) for part in pair)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).reshape(len(x), -1)


def next_characters(train: np.ndarray, test: np.ndarray, alphabet: str | None, folder: Path) -> Dataset:
    """The data set of the last character of each row of `code_points`, for the task next_symbol."""
    if train.shape[1] != test.shape[1]:
        wide = f"{train.shape[1] - 1} characters in train/ and {test.shape[1] - 1} in test/"
        raise UserError(f"{folder}: the strings have {wide}; they must have as many")
    seen, tested = (np.unique(part) for part in (train, test))
    if alphabet is None:
        symbols = [chr(code) for code in seen]
        if len(np.setdiff1d(tested, seen)) and UNKNOWN not in symbols:
            symbols.append(UNKNOWN)
    else:
        check_alphabet(alphabet)
        strange = {chr(code) for code in (*seen, *tested)} - {*alphabet}
        if strange:
            raise UserError(f"{folder} holds {show(min(strange))}, which is not in data.alphabet; add it there")
        symbols = list(alphabet)
    number = np.full(max(int(seen.max()), int(tested.max())) + 1, symbols.index(UNKNOWN) if UNKNOWN in symbols else 0)
    for k, symbol in enumerate(symbols):
        if ord(symbol) < len(number):
            number[ord(symbol)] = k
    x, y, test_x, test_y = (tensor for part in (train, test) for tensor in _last(torch.from_numpy(number[part])))
    made = TextPreparation(tuple(symbols), x.shape[1], closed=alphabet is not None, last=True)
    return Dataset(x, y, test_x, test_y, len(symbols), meaning=tuple(symbols), preparation=made)


def _last(rows: Tensor) -> tuple[Tensor, Tensor]:
    """x (n, L), and y (n, L) of which only the last entry counts."""
    y = torch.full((len(rows), rows.shape[1] - 1), UNUSED)
    y[:, -1] = rows[:, -1]
    return rows[:, :-1], y


def encode(
    train: Sequence[str], test: Sequence[str], words: Literal["count", "sequence"], vocabulary: int, length: int
) -> tuple[Tensor, Tensor]:
    """The texts of both parts as numbers of the most frequent words of the training part; see `leaf`."""
    counts = Counter(word for text in train for word in WORD.findall(text))
    most = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
    number = {word: k for k, word in enumerate(most)}
    if words == "count":
        return _count(train, number, vocabulary), _count(test, number, vocabulary)
    return _sequence(train, number, length), _sequence(test, number, length)


def _count(texts: Sequence[str], number: dict[str, int], vocabulary: int) -> Tensor:
    """(n, vocabulary) float32"""
    out = np.zeros((len(texts), vocabulary), np.float32)
    for row, text in enumerate(texts):
        for word in WORD.findall(text):
            if word in number:
                out[row, number[word]] += 1
    return torch.from_numpy(out)


def _sequence(texts: Sequence[str], number: dict[str, int], length: int) -> Tensor:
    """(n, length) int64"""
    out = np.full((len(texts), length), END)
    for row, text in enumerate(texts):
        found = [number[word] + FIRST if word in number else OTHER for word in WORD.findall(text)[:length]]
        out[row, : len(found)] = found
    return torch.from_numpy(out)
