"""The data sources `text` and `shakespeare`: texts by author or role, for predicting the next character.

Texts are cut into windows of symbols: x (n, L), and y (n, L), the symbol after each symbol of x.
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

UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # stands for characters that do not occur in training parts
IGNORE_INDEX = -100  # target that the task next_symbol ignores
SHAKESPEARE_FILE = "data/tinyshakespeare/input.txt from github.com/karpathy/char-rnn"

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
    """Texts by author, for predicting the next character: a CSV or Parquet file root/path, or a folder of .txt files.

    A CSV or Parquet file has one row per text; the texts of an author are joined by line feeds in the order of the
    file, and carriage returns become line feeds. In a folder, AUTHOR.txt contains all texts of one author. The text of
    an author is cut into consecutive windows, and the remainder at its end is dropped; a text that is too short for one
    window raises an error. With data.silos, each silo has the .txt file of one author, and `alphabet` is required.

    path: the file or folder, relative to data.root; for silos it may contain {site}, which is replaced by the name of
    the silo. Without path, the name of the silo is the file name.
    author_column: the column with the author of each text.
    text_column: the column with the texts.
    context: the number of characters in a window x; y contains the character after each of them.
    alphabet: the characters, ordered by index; by default those of all training parts, sorted, and a symbol
    for unknown characters if test parts contain any.
    min_chars: authors with fewer characters are left out.
    test_fraction: the fraction of each author's text, taken from its end, that is held out as the test part.
    delimiter: the character that separates the cells of a CSV file.
    """
    name = resolve_file_name("text", site, path)
    file = root / name
    file = (
        file
        if os.path.isdir(file) and site is None
        else find_file(root, (name,), "text", "correct data.root or data.path")
    )
    if site is not None:
        if alphabet is None:
            raise UserError(
                "text: data.silos requires data.alphabet, because no site knows which characters occur in the texts of "
                "the other sites; set data.alphabet"
            )
        return dataset_from_texts(
            {site: AuthorText(read_utf8(file), str(file))}, context, test_fraction, alphabet=alphabet
        )
    columns = author_column, text_column, delimiter
    texts = read_texts(file, *columns)
    texts = {author: texts[author] for author in sort_naturally(texts)}
    return dataset_from_texts(texts, context, test_fraction, min_chars, alphabet, columns)


def shakespeare(
    root: Path,
    *,
    context: Context = 80,
    min_chars: Annotated[int, Field(ge=1)] = 1000,
    test_fraction: Fraction = 0.2,
) -> Dataset:
    """Tiny Shakespeare (Karpathy 2015): next-character prediction, with one site per role, as in LEAF's Shakespeare.

    The file is root/tinyshakespeare/input.txt or root/input.txt. Speeches are separated by an empty line and begin with
    the line `Role:`. The speeches of a role are joined by line feeds, and cut into consecutive windows.

    context: the number of characters in a window x (n, context); y (n, context) is the character after each of them.
    min_chars: roles with fewer characters are left out; 141 of the 309 roles have at least 1,000.
    test_fraction: the fraction of each role's text, taken from its end, that is held out as the test part.
    """
    file = find_file(
        root,
        ("tinyshakespeare/input.txt", "input.txt"),
        "shakespeare",
        f"correct data.root; the file is {SHAKESPEARE_FILE}",
    )
    speeches: dict[str, list[str]] = {}
    for block in read_utf8(file).strip().split("\n\n"):
        role, _, speech = block.strip("\n").partition("\n")
        if not role.endswith(":"):
            raise UserError(
                f"{file}: a speech must begin with a line that names the speaker, such as 'ROMEO:', but one begins "
                f"with {role[:40]!r}; download {SHAKESPEARE_FILE} again"
            )
        speeches.setdefault(role[:-1], []).append(speech)
    texts = {role: AuthorText("\n".join(speeches[role]), f"{file}, role {role}") for role in sorted(speeches)}
    return dataset_from_texts(texts, context, test_fraction, min_chars)


# ---- files ----
class AuthorText(NamedTuple):
    """The text of one author, and its file and line for messages."""

    text: str
    location: str


def read_texts(path: Path, author_column: str, text_column: str, delimiter: str) -> dict[str, AuthorText]:
    """Read the text of each author from a table, from a .txt file, or from a folder of .txt files."""
    if path.is_dir() or path.suffix.lower() == ".txt":
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [file for file in files if file.suffix.lower() == ".txt" and not file.name.startswith(".")]
        if not files:
            raise UserError(f"{path} contains no .txt file; store the texts of each author in one file AUTHOR.txt")
        return {file.stem: AuthorText(read_utf8(file), str(file)) for file in files}
    table = read_table(path, delimiter)
    authors, cells = table.parse_words(author_column, "author_column"), table.column(text_column, "text_column")
    if cells.dtype == np.float64:
        raise UserError(
            f"{path}: column {text_column!r} (data.text_column) contains numbers, not texts; name the column of texts"
        )
    pieces: dict[str, list[str]] = {}
    locations: dict[str, str] = {}
    for row, (author, piece) in enumerate(zip(authors, decode_cells(cells), strict=True)):
        if not author:
            raise UserError(
                f"{table.row_location(row)}: the cell in column {author_column!r} is empty; enter the author, or "
                "remove the row"
            )
        pieces.setdefault(author, []).append(piece.replace("\r\n", "\n").replace("\r", "\n"))
        locations.setdefault(author, table.row_location(row))
    return {
        author: AuthorText("\n".join(texts_of_author), locations[author]) for author, texts_of_author in pieces.items()
    }


def read_utf8(file: Path) -> str:
    """Read a text file in UTF-8; raise UserError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")  # -sig removes the byte order mark that some editors write
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as text in UTF-8: {error}; save it as UTF-8") from error


# ---- windows ----
@dataclass(frozen=True)
class TextPreparation(Preparation):
    """The conversion of new texts to windows of symbols.

    Attributes:
        alphabet: the characters, ordered by index.
        context: the length of a window in characters.
        closed: whether a character that is not in the alphabet raises an error, because the config defines the
            alphabet. Otherwise it becomes UNKNOWN_CHARACTER, if the alphabet contains this symbol.
        author_column, text_column, delimiter: options of the source `text`.
        last: whether the only target of a window is the character that follows it.
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
        """The characters, ordered by index."""
        return self.alphabet

    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        """Cut each text into windows as in training, and add a last window that ends at the end of the text.

        The character after the last window is unknown, so this window has no targets and is excluded from all metrics.
        """
        if isinstance(request.rows, str) and "\n" in request.rows:
            texts: Mapping[str, AuthorText] = {"text": AuthorText(request.rows, "rows")}
        else:
            texts = read_texts(check_path(request, folder=True), self.author_column, self.text_column, self.delimiter)
        names, starts, parts, ends = [], [], [], []
        for name, (characters, location) in texts.items():
            if len(characters) < self.context:
                problem = f"text {name!r} has only {len(characters)} characters"
                raise UserError(f"{location}: {problem}, but the model was trained on windows of {self.context}")
            if self.closed or UNKNOWN_CHARACTER not in self.alphabet:
                check_characters(
                    characters, self.alphabet, f"{location}: {name!r}", "which is not in the training data"
                )
            rows = cut_windows(characters, self.alphabet, self.context)
            last_window = encode_characters(to_code_points(characters[-self.context :]), self.alphabet)
            parts += [rows[:, :-1], last_window[None]]
            targets = rows[:, 1:].clone()
            targets[:, : -1 if self.last else 0] = IGNORE_INDEX
            ends += [targets, torch.full((1, self.context), IGNORE_INDEX)]
            names += [name] * (len(rows) + 1)
            starts += [*(k * self.context + 1 for k in range(len(rows))), len(characters) - self.context + 1]
        ids = {"text": np.array(names, dtype=object), "character": np.array(starts)}
        return NewRows(ids, torch.cat(parts), torch.cat(ends))


def to_code_points(text: str) -> np.ndarray:
    """Return the Unicode code points of a text, (n,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def encode_characters(codes: np.ndarray, alphabet: Sequence[str]) -> Tensor:
    """Convert code points (...) to their indices in the alphabet, (...) int64.

    Unknown characters are mapped to the index of UNKNOWN_CHARACTER, or to 0 if the alphabet does not contain it.
    """
    known = [ord(symbol) for symbol in alphabet]
    largest = max(*known, int(codes.max(initial=0)))
    table = np.full(largest + 1, alphabet.index(UNKNOWN_CHARACTER) if UNKNOWN_CHARACTER in alphabet else 0)
    table[known] = np.arange(len(alphabet))
    return torch.from_numpy(table[codes])


def check_characters(text: str, alphabet: Sequence[str], location: str, reason: str = "") -> None:
    """Raise UserError if a text contains a character that is not in the alphabet, or if the alphabet has duplicates.

    Args:
        alphabet: the characters, ordered by index.
        location: the file, line or author of the text, for the message.
        reason: why characters outside the alphabet are not allowed, for the message; "": the message says that the
            character is not in data.alphabet.
    """
    duplicate = next((symbol for k, symbol in enumerate(alphabet) if symbol in alphabet[:k]), None)
    if duplicate is not None:
        raise UserError(f"data.alphabet contains {shorten_repr(duplicate)} twice; list each character only once")
    unknown = {*text} - {*alphabet}
    if unknown:
        remedy = "replace it in the text" if reason else "add it there, or replace it in the text"
        reason = reason or "which is not in data.alphabet"
        raise UserError(f"{location} contains {shorten_repr(min(unknown))}, {reason}; {remedy}")


def make_alphabet(train: set[str], test: set[str]) -> tuple[str, ...]:
    """Return the characters of the training part, sorted, and UNKNOWN_CHARACTER if others occur in the test part."""
    return (*sorted(train), *([UNKNOWN_CHARACTER] if test - train and UNKNOWN_CHARACTER not in train else []))


def cut_windows(text: str, alphabet: Sequence[str], context: int) -> Tensor:
    """Cut a text into consecutive windows, each with the symbol after it, (windows, context + 1) int64."""
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
    """Convert texts to a data set whose sites are the authors.

    Args:
        texts: the text of each author.
        context: the number of characters in a window. A part of n characters has floor((n - 1) / context) windows.
        test_fraction: the fraction of each text, taken from its end, that is held out as the test part.
        min_chars: authors with fewer characters are left out.
        alphabet: the characters, ordered by index; None: those of the training parts.
        columns: author column, text column and delimiter, stored so that new texts can later be read in the same way.

    Raises:
        UserError: the training part of an author has fewer than context + 1 characters.
    """
    texts = {name: text for name, text in texts.items() if len(text.text) >= min_chars}
    if not texts:
        raise UserError(
            f"data.min_chars: {min_chars} is too large, because no author has that many characters; lower it"
        )
    train, test = {}, {}
    for name, (characters, location) in texts.items():
        end = len(characters) - int(test_fraction * len(characters))
        train[name], test[name] = characters[:end], characters[end:]
        if end < context + 1:
            problem = f"author {name!r} has only {pluralize(end, 'training character')} ({len(characters)} in all)"
            needed = f"but data.context={context} needs at least {context + 1}"
            remedy = "lower data.context, or leave out short texts with data.min_chars"
            raise UserError(f"{location}: {problem}, {needed}; {remedy}")
        if alphabet is not None:
            check_characters(characters, alphabet, f"{location}: the text of author {name!r}")
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
