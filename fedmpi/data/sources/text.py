"""The next character of texts by author: any texts of one's own, and Tiny Shakespeare by role."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import checked_fraction, find, with_columns
from fedmpi.data.sources.text_files import Text, read_text, texts_of
from fedmpi.data.sources.text_windows import windows


def text(
    root: Path,
    *,
    site: str | None = None,
    path: str | None = None,
    test_path: Annotated[str, Field(min_length=1)] | None = None,
    author_column: str = "author",
    text_column: str = "text",
    context: Annotated[int, Field(ge=1, le=100_000)] = 80,
    alphabet: Annotated[str, Field(min_length=2)] | None = None,
    min_chars: Annotated[int, Field(ge=1)] | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
) -> Dataset:
    """The next character, for texts by author: root/path is a CSV, a Parquet or a .jsonl file, or a folder of *.txt;
    or the HDF5 file of TensorFlow Federated's Shakespeare.

    A file has a row for each text; rows of one author are joined by a line feed, in the file's order, and carriage
    returns become line feeds. author_column: whose each text is; text_column: the texts; delimiter: between the fields
    of a CSV. In a folder AUTHOR.txt is an author's. x is a window of `context` characters, y the character after each
    of them. A text is cut into windows, one after the other, whose rest is left out; one that is too short for a window
    is refused, or left out with its author by min_chars. The last test_fraction (0.2) of each author's characters is
    the test part. test_path: a file or folder like that of path, with the test part of each author.
    alphabet: the characters in the order of their numbers; without it, those of all training parts, sorted, and one
    more, if need be, for what occurs in test parts alone. In silo mode, which needs it, a silo is one author's .txt:
    path may hold {site}, which becomes the silo's name, and without path the silo's name is the file's.
    """
    share = checked_fraction(test_fraction, f"data.test_path: {test_path}" if test_path else "")
    if site is not None:
        if test_path is not None:
            raise UserError("text: data.test_path goes with data.path of all authors, not with silos; leave it out")
        return _silo(root, site, path, context, share, alphabet)
    if path is None:
        raise UserError("text: data.path is missing; it names a file, or a folder of *.txt, relative to data.root")

    def read(name: str, key: str) -> dict[str, Text]:
        at = root / name
        at = at if os.path.isdir(at) else find(root, (name,), "text", f"correct data.root or data.{key}")
        if at.is_file() and at.suffix.lower() == ".txt":
            said = f"{at} is one author's text; data.{key} names the folder, or a table with a row for each text"
            raise UserError(said)
        texts = texts_of(at, author_column, text_column, delimiter)
        return {author: texts[author] for author in natural_order(texts)}

    tests = read(test_path, "test_path") if test_path else None
    found = windows(read(path, "path"), context, share, min_chars, alphabet, tests)
    return with_columns(found, author_column=author_column, text_column=text_column, delimiter=delimiter)


def _silo(root: Path, site: str, path: str | None, context: int, test_fraction: float, alphabet: str | None) -> Dataset:
    if alphabet is None:
        raise UserError("text: data.alphabet is missing; silos need it, for none knows the others' characters")
    if path is not None and "{site}" not in path:
        raise UserError(f"text: data.path: {path!r} would be one file for all silos; write {{site}} where they differ")
    at = find(root, ((path or "{site}").replace("{site}", site),), "text", "correct data.root or data.path")
    return windows({site: Text(read_text(at), str(at))}, context, test_fraction, None, alphabet)


FILE = "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"


def shakespeare(
    root: Path,
    *,
    context: Annotated[int, Field(ge=1, le=100_000)] = 80,
    min_chars: Annotated[int, Field(ge=1)] = 1000,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
) -> Dataset:
    """Tiny Shakespeare (Karpathy 2015): the next character, by role, in the spirit of LEAF's Shakespeare.

    File tinyshakespeare/input.txt, or input.txt, under root: speeches with an empty line between them, the first line
    `Role:`. A role is a site; its speeches, joined by a line feed, are cut in time: the last test_fraction of its
    characters is its test part. x (n, context) and y (n, context), the character after each, are windows one after the
    other. Roles with fewer than min_chars characters are left out; 141 of 309 have 1,000.
    """
    at = find(root, ("tinyshakespeare/input.txt", "input.txt"), "shakespeare", f"correct data.root; the file is {FILE}")
    try:
        content = at.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{at} cannot be read: {error}; fetch {FILE}") from error
    spoken: dict[str, list[str]] = {}
    line = 1
    for block in content.strip().split("\n\n"):
        role, _, speech = block.strip("\n").partition("\n")
        if not role.endswith(":"):
            raise UserError(
                f"{at}, about line {line}: a speech begins with {role[:40]!r}, not with `Role:`; fetch {FILE}"
            )
        spoken.setdefault(role[:-1], []).append(speech)
        line += block.count("\n") + 2
    texts = {role: Text("\n".join(spoken[role]), f"{at}, role {role}") for role in sorted(spoken)}
    return windows(texts, context, test_fraction, min_chars, None)
