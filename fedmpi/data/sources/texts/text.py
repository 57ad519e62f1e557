"""Texts by author: a table of them, JSON lines, or a folder of files."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import brief, natural_order, nearest, show, twins
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import find
from fedmpi.data.sources.tables.files import read
from fedmpi.data.sources.texts.preparation import Text, for_columns
from fedmpi.data.sources.texts.windows import windows


def text(
    root: Path,
    *,
    site: str | None = None,
    path: str | None = None,
    author_column: str = "author",
    text_column: str = "text",
    context: Annotated[int, Field(ge=1, le=100_000)] = 80,
    alphabet: Annotated[str, Field(min_length=2)] | None = None,
    min_chars: Annotated[int, Field(ge=1)] | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
) -> Dataset:
    """The next character, for texts by author: root/path is a CSV, a Parquet or a .jsonl file, or a folder of *.txt.

    A file has a row for each text; rows of one author are joined by a line feed, in the file's order. author_column:
    whose each text is; text_column: the texts; delimiter: between the fields of a CSV. In a folder AUTHOR.txt is an
    author's. x is a window of `context` characters, y the character after each of them. A text is cut into windows, one
    after the other, whose rest is left out; one that is too short for a window is refused, or left out with its author
    by min_chars. The last test_fraction of each author's characters is the test part.
    alphabet: the characters in the order of their numbers; without it, those of all training parts, sorted, and one
    more, if need be, for what occurs in test parts alone. In silo mode, which needs it, a silo is one author's .txt:
    path may hold {site}, which becomes the silo's name, and without path the silo's name is the file's.
    """
    if site is not None:
        return _silo(root, site, path, context, test_fraction, alphabet)
    if path is None:
        raise UserError("text: data.path is missing; it names a file, or a folder of *.txt, relative to data.root")
    folder = root / path
    at = folder if os.path.isdir(folder) else find(root, (path,), "text", "correct data.root or data.path")
    if at.is_file() and at.suffix.lower() == ".txt":
        raise UserError(f"{at} is one author's text; data.path names the folder, or a table with a row for each text")
    texts = texts_of(at, author_column, text_column, delimiter)
    texts = {author: texts[author] for author in natural_order(texts)}
    found = windows(texts, context, test_fraction, min_chars, alphabet)
    return replace(found, preparation=for_columns(found.preparation, author_column, text_column, delimiter))


def texts_of(at: Path, author_column: str, text_column: str, delimiter: str) -> dict[str, Text]:
    """The text of each author in a file, or in a folder of .txt files."""
    if at.is_dir():
        return {file.stem: Text(_content(file), str(file)) for file in _files(at)}
    ending, keys = at.suffix.lower(), (author_column, text_column)
    if ending == ".txt":
        return {at.stem: Text(_content(at), str(at))}
    if ending == ".json":
        raise UserError(f"{at} is not read as a whole; write it as .jsonl, one object a line")
    lines = ending in (".jsonl", ".ndjson")
    return _joined(_json_rows(at, *keys) if lines else _table_rows(at, *keys, delimiter))


def _files(folder: Path) -> list[Path]:
    """The .txt files of a folder, sorted; what else lies there is told, for it may be an author's."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() == ".txt"]
    left = [entry.name for entry in entries if entry not in files]
    if not files:
        there = f", but {brief(', '.join(left))}" if left else ""
        raise UserError(f"{folder} holds no file *.txt{there}; all that an author wrote is expected in one AUTHOR.txt")
    if left:
        warnings.warn(f"data: {folder}: not read, being no *.txt: {brief(', '.join(left))}", stacklevel=3)
    twice = twins(file.stem for file in files)
    if twice:
        warnings.warn(f"data: {folder}: {twice[0]!r} and {twice[1]!r} are two authors", stacklevel=3)
    return files


def _silo(root: Path, site: str, path: str | None, context: int, test_fraction: float, alphabet: str | None) -> Dataset:
    if alphabet is None:
        raise UserError("text: data.alphabet is missing; silos need it, for none knows the others' characters")
    if path is not None and "{site}" not in path:
        raise UserError(f"text: data.path: {path!r} would be one file for all silos; write {{site}} where they differ")
    at = find(root, ((path or "{site}").replace("{site}", site),), "text", "correct data.root or data.path")
    data = windows({site: Text(_content(at), str(at))}, context, test_fraction, None, alphabet)
    return data


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # -sig: the mark with which some editors begin a file
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} cannot be read as text in UTF-8: {error}; save it as UTF-8") from error


def _joined(rows: list[tuple[str, str, str]]) -> dict[str, Text]:
    """author -> all of their texts; rows: (author, text, place)"""
    pieces: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for who, said, place in rows:
        pieces.setdefault(who, []).append(said)
        first.setdefault(who, place)
    twice = twins(pieces)
    if twice:
        who = " and ".join(f"{name!r} ({first[name]})" for name in twice)
        warnings.warn(f"data: {who} are two authors; are they one?", stacklevel=3)
    return {who: Text("\n".join(pieces[who]), first[who]) for who in pieces}


def _table_rows(at: Path, author: str, column: str, delimiter: str) -> list[tuple[str, str, str]]:
    table = read(at, delimiter)
    who, said = table.words(author, "author_column"), table.column(column, "text_column")
    if said.dtype != object:
        raise UserError(f"{at}: column {column!r} (data.text_column) holds numbers, not texts")
    for row, name in enumerate(who):
        if not name:
            raise UserError(f"{table.at(row)}: column {author!r} is empty; every text needs an author")
    return [(who[row], said[row], table.at(row)) for row in range(len(table))]


def _json_rows(at: Path, author: str, column: str) -> list[tuple[str, str, str]]:
    rows = []
    for number, line in enumerate(_content(at).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{at}, line {number}"
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise UserError(f"{place} is no JSON: {error}; one object a line is needed") from error
        if not isinstance(row, dict):
            raise UserError(f"{place} holds {show(row)}; an object with {author!r} and {column!r} is needed")
        for key, said in ((author, "author_column"), (column, "text_column")):
            if key not in row:
                raise UserError(f"{place} has no {key!r} (data.{said}); {nearest(key, row)}")
            if not isinstance(row[key], str) or (said == "author_column" and not row[key].strip()):
                raise UserError(f"{place}: {key!r} is {show(row[key])}; text is needed")
        rows.append((row[author].strip(), row[column], place))
    if not rows:
        raise UserError(f"{at} is empty; one object a line is needed")
    return rows
