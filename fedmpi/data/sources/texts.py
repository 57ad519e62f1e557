"""Texts by author, for predicting the next character: texts of the user, and Tiny Shakespeare by role.

Texts become windows of symbols: x (n, L), and y (n, L), which holds the symbol after each symbol of x.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize, shorten_repr, sort_naturally
from fedmpi.data.csv_file import decode_cells
from fedmpi.data.dataset import Dataset
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation, check_path
from fedmpi.data.sources.source_utils import find_file, resolve_file_name, with_clients_as_sites
from fedmpi.data.sources.tables.read_table import read_table

UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # stands for characters that occur in test parts only
IGNORE_INDEX = -100  # a target that the task next_symbol ignores
SHAKESPEARE_FILE = "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"

Context = Annotated[int, Field(ge=1, le=100_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def text(
    root: Path,
    *,
    site: str | None = None,
    path: str | None = None,
    author_column: str = "author",
    text_column: str = "text",
    context: Context = 80,
    alphabet: Annotated[str, Field(min_length=2)] | None = None,
    min_chars: Annotated[int, Field(ge=1)] = 1,
    test_fraction: Fraction = 0.2,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
) -> Dataset:
    """Texts by author, for predicting the next character: root/path is a CSV or a Parquet file, or a folder of *.txt.

    A file has one row per text. The texts of an author are joined by line feeds in the order of the file, and carriage
    returns become line feeds. In a folder, AUTHOR.txt holds the texts of one author. Each text is cut into consecutive
    windows; the rest at its end is dropped, and a text that is too short for one window is an error. In silo mode a
    silo is the .txt file of one author, and `alphabet` is required.

    path: the file or folder, relative to data.root; for silos it may contain {site}, which is replaced by the name of
    the silo. Without path the name of the silo is the file's name.
    author_column: the column with the author of each text.
    text_column: the column with the texts.
    context: the number of characters of a window x; y holds the character after each of them.
    alphabet: the characters in the order of their numbers; by default those of all training parts, sorted, and one more
    if others occur in test parts only.
    min_chars: authors with fewer characters are left out.
    test_fraction: the end of each author's text, this share of its characters, is the test part.
    delimiter: the separator of the cells of a CSV file.
    """
    name = resolve_file_name("text", site, path)
    at = root / name
    at = (
        at if os.path.isdir(at) and site is None else find_file(root, (name,), "text", "correct data.root or data.path")
    )
    if site is not None:
        if alphabet is None:
            raise UserError("text: data.alphabet is missing; silos need it, for none knows the others' characters")
        return dataset_from_texts({site: AuthorText(read_utf8(at), str(at))}, context, test_fraction, alphabet=alphabet)
    columns = author_column, text_column, delimiter
    texts = read_texts(at, *columns)
    texts = {author: texts[author] for author in sort_naturally(texts)}
    return dataset_from_texts(texts, context, test_fraction, min_chars, alphabet, columns)


def shakespeare(
    root: Path,
    *,
    context: Context = 80,
    min_chars: Annotated[int, Field(ge=1)] = 1000,
    test_fraction: Fraction = 0.2,
) -> Dataset:
    """Tiny Shakespeare (Karpathy 2015): the next character, by role, similar to LEAF's Shakespeare.

    The file is tinyshakespeare/input.txt, or input.txt, below root. Speeches are separated by an empty line and begin
    with the line `Role:`. Each role is a site. Its speeches are joined by line feeds, and cut into consecutive windows.

    context: the number of characters of a window x (n, context); y (n, context) is the character after each of them.
    min_chars: roles with fewer characters are left out; 141 of 309 roles have 1,000.
    test_fraction: the end of each role's text, this share of its characters, is the test part.
    """
    at = find_file(
        root,
        ("tinyshakespeare/input.txt", "input.txt"),
        "shakespeare",
        f"correct data.root; the file is {SHAKESPEARE_FILE}",
    )
    speeches: dict[str, list[str]] = {}
    for block in read_utf8(at).strip().split("\n\n"):
        role, _, speech = block.strip("\n").partition("\n")
        if not role.endswith(":"):
            raise UserError(f"{at}: a speech begins with {role[:40]!r}, not with `Role:`; fetch {SHAKESPEARE_FILE}")
        speeches.setdefault(role[:-1], []).append(speech)
    texts = {role: AuthorText("\n".join(speeches[role]), f"{at}, role {role}") for role in sorted(speeches)}
    return dataset_from_texts(texts, context, test_fraction, min_chars)


# ---- files ----
class AuthorText(NamedTuple):
    """The text of one author in order of time, and its file and line for messages."""

    text: str
    location: str


def read_texts(at: Path, author_column: str, text_column: str, delimiter: str) -> dict[str, AuthorText]:
    """Read the text of each author from a table, from a .txt file, or from a folder of .txt files."""
    if at.is_dir() or at.suffix.lower() == ".txt":
        files = sorted(at.iterdir()) if at.is_dir() else [at]
        files = [file for file in files if file.suffix.lower() == ".txt" and not file.name.startswith(".")]
        if not files:
            raise UserError(f"{at} holds no file *.txt; all that an author wrote is expected in one AUTHOR.txt")
        return {file.stem: AuthorText(read_utf8(file), str(file)) for file in files}
    table = read_table(at, delimiter)
    authors, cells = table.parse_words(author_column, "author_column"), table.column(text_column, "text_column")
    if cells.dtype == np.float64:
        raise UserError(f"{at}: column {text_column!r} (data.text_column) holds numbers, not texts")
    pieces: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for row, (author, piece) in enumerate(zip(authors, decode_cells(cells), strict=True)):
        if not author:
            raise UserError(f"{table.row_location(row)}: column {author_column!r} is empty; every text needs an author")
        pieces.setdefault(author, []).append(piece.replace("\r\n", "\n").replace("\r", "\n"))
        places.setdefault(author, table.row_location(row))
    return {author: AuthorText("\n".join(own), places[author]) for author, own in pieces.items()}


def read_utf8(file: Path) -> str:
    """Read a text file in UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")  # -sig removes the byte order mark that some editors write
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as text in UTF-8: {error}; save it as UTF-8") from error


# ---- windows ----
@dataclass(frozen=True)
class TextPreparation(Preparation):
    """The conversion of texts to windows of symbols, for new texts.

    Attributes:
        alphabet: the characters in the order of their numbers.
        context: the length of a window in characters.
        closed: the config defines the alphabet, and other characters are errors. Otherwise they become UNKNOWN, if the
            alphabet has that character.
        last: only the target after the end of a window counts.
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

    def read(self, request: PredictionRequest) -> NewRows:
        """Cut each text into windows as in training, and add its last characters, whose next character is unknown.

        Targets are those of the windows. The window of the last characters has none, so it counts in no metric.
        """
        if isinstance(request.rows, str) and "\n" in request.rows:
            texts: Mapping[str, AuthorText] = {"text": AuthorText(request.rows, "rows")}
        else:
            texts = read_texts(check_path(request, folder=True), self.author_column, self.text_column, self.delimiter)
        names, starts, parts, ends = [], [], [], []
        for name, (characters, place) in texts.items():
            if len(characters) < self.context:
                few = f"text {name!r} has {len(characters)} characters"
                raise UserError(f"{place}: {few}; the model was trained on windows of {self.context}")
            if self.closed or UNKNOWN_CHARACTER not in self.alphabet:
                check_characters(characters, self.alphabet, f"{place}: {name!r}", "which the training did not have")
            rows = cut_windows(characters, self.alphabet, self.context)
            last = encode_characters(to_code_points(characters[-self.context :]), self.alphabet)
            parts += [rows[:, :-1], last[None]]
            targets = rows[:, 1:].clone()
            targets[:, : -1 if self.last else 0] = IGNORE_INDEX
            ends += [targets, torch.full((1, self.context), IGNORE_INDEX)]
            names += [name] * (len(rows) + 1)
            starts += [*(k * self.context + 1 for k in range(len(rows))), len(characters) - self.context + 1]
        ids = {"text": np.array(names, dtype=object), "character": np.array(starts)}
        return NewRows(ids, torch.cat(parts), torch.cat(ends))


def to_code_points(text: str) -> np.ndarray:
    """Return the Unicode numbers of a text's characters, (n,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def encode_characters(codes: np.ndarray, alphabet: Sequence[str]) -> Tensor:
    """Return the alphabet's index, int64, of each code point (...); unknown characters become UNKNOWN, or 0."""
    known = [ord(symbol) for symbol in alphabet]
    largest = max(*known, int(codes.max(initial=0)))
    table = np.full(largest + 1, alphabet.index(UNKNOWN_CHARACTER) if UNKNOWN_CHARACTER in alphabet else 0)
    table[known] = np.arange(len(alphabet))
    return torch.from_numpy(table[codes])


def check_characters(text: str, alphabet: Sequence[str], where: str, reason: str = "") -> None:
    """Raise UserError for a character of the text that is not in the alphabet, or that the alphabet has twice."""
    twice = next((symbol for k, symbol in enumerate(alphabet) if symbol in alphabet[:k]), None)
    if twice is not None:
        raise UserError(f"data.alphabet holds {shorten_repr(twice)} twice; each character stands once")
    strange = {*text} - {*alphabet}
    if strange:
        reason = reason or "which is not in data.alphabet"
        raise UserError(f"{where} holds {shorten_repr(min(strange))}, {reason}; add it there, or replace it")


def make_alphabet(train: set[str], test: set[str]) -> tuple[str, ...]:
    """Return the characters of the training part, sorted, and UNKNOWN if others occur in the test part."""
    return (*sorted(train), *([UNKNOWN_CHARACTER] if test - train and UNKNOWN_CHARACTER not in train else []))


def cut_windows(text: str, alphabet: Sequence[str], context: int) -> Tensor:
    """Return consecutive windows of the text, each with the symbol after it, (windows, context + 1) int64."""
    numbers = encode_characters(to_code_points(text), alphabet)
    return numbers.unfold(0, context + 1, context) if len(text) > context else numbers.new_empty(0, context + 1)


def dataset_from_texts(
    texts: Mapping[str, AuthorText],
    context: int,
    test_fraction: float,
    min_chars: int = 1,
    alphabet: str | None = None,
    columns: tuple[str, str, str] = ("author", "text", ","),
) -> Dataset:
    """Return the data set of the texts of several authors, who are its sites.

    The first 1 - test_fraction of a text is the training part. A part of n characters is cut into floor((n - 1) /
    context) consecutive windows. Authors with fewer than min_chars characters are left out.

    Raises:
        UserError: the training part of an author is shorter than a window and the character after it.
    """
    texts = {name: text for name, text in texts.items() if len(text.text) >= min_chars}
    if not texts:
        raise UserError(f"data.min_chars: {min_chars}: no author has so many characters; lower it")
    train, test = {}, {}
    for name, (characters, place) in texts.items():
        end = len(characters) - int(test_fraction * len(characters))
        train[name], test[name] = characters[:end], characters[end:]
        if end < context + 1:
            few = f"author {name!r} has {pluralize(end, 'character')} to train on, of {len(characters)}"
            remedy = f"data.context = {context} needs {context + 1}: lower it, or leave short authors out"
            raise UserError(f"{place}: {few}; {remedy} with data.min_chars")
        if alphabet is not None:
            check_characters(characters, alphabet, f"{place}: author {name!r}")
    symbols = tuple(alphabet or make_alphabet({*"".join(train.values())}, {*"".join(test.values())}))
    rows, test_rows = ([cut_windows(part, symbols, context) for part in parts.values()] for parts in (train, test))
    x, test_x = torch.cat(rows), torch.cat(test_rows)
    data = Dataset(
        *(x[:, :-1].contiguous(), x[:, 1:].contiguous(), test_x[:, :-1].contiguous(), test_x[:, 1:].contiguous()),
        classes=len(symbols),
        input_and_class_names=symbols,
        preparation=TextPreparation(symbols, context, alphabet is not None, *columns),
    )
    owner, test_owner = (np.repeat(np.arange(len(texts)), list(map(len, each))) for each in (rows, test_rows))
    return with_clients_as_sites(data, list(texts), owner, test_owner)
