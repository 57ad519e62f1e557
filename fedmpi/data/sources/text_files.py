"""Files of texts by author: a table of them, JSON lines, a folder of .txt files, or one of these."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import near_duplicates, nearest, shorten, show
from fedmpi.data.csv_file import text_of
from fedmpi.data.sources.hdf5 import open_file
from fedmpi.data.sources.tables.files import read


@dataclass(frozen=True)
class Text:
    """What one author wrote, in order of time, and where it stands, for messages."""

    text: str
    place: str


def texts_of(at: Path, author_column: str, text_column: str, delimiter: str) -> dict[str, Text]:
    """The text of each author in a file, or in a folder of .txt files."""
    if at.is_dir():
        return {file.stem: Text(read_text(file), str(file)) for file in _files(at)}
    ending, keys = at.suffix.lower(), (author_column, text_column)
    if ending == ".txt":
        return {at.stem: Text(read_text(at), str(at))}
    if ending in (".h5", ".hdf5"):
        return _hdf5_texts(at)
    if ending == ".json":
        raise UserError(f"{at} is not read as a whole; write it as .jsonl, one object a line")
    lines = ending in (".jsonl", ".ndjson")
    return _joined(_json_rows(at, *keys) if lines else _table_rows(at, *keys, delimiter))


def _hdf5_texts(at: Path) -> dict[str, Text]:
    """The snippets of each client of TensorFlow Federated's Shakespeare, joined by a line feed."""
    found = open_file(at)
    clients = found.get("examples", {})
    texts = {name: clients[name].get("snippets") for name in clients}
    if not texts or any(snippets is None or snippets.dtype.kind != "O" for snippets in texts.values()):
        raise UserError(f"{at} has no texts examples/CLIENT/snippets; arrays are read by data.source: hdf5")
    return {name: Text("\n".join(texts[name].asstr()[()]), f"{at}, client {name}") for name in texts}


def _files(folder: Path) -> list[Path]:
    """The .txt files of a folder, sorted; what else lies there is told, for it may be an author's."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() == ".txt"]
    left = [entry.name for entry in entries if entry not in files]
    if not files:
        there = f", but {shorten(', '.join(left))}" if left else ""
        raise UserError(f"{folder} holds no file *.txt{there}; all that an author wrote is expected in one AUTHOR.txt")
    if left:
        warnings.warn(f"data: {folder}: not read, being no *.txt: {shorten(', '.join(left))}", stacklevel=3)
    twice = near_duplicates(file.stem for file in files)
    if twice:
        warnings.warn(f"data: {folder}: {twice[0]!r} and {twice[1]!r} are two authors", stacklevel=3)
    return files


def read_text(file: Path) -> str:
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
    twice = near_duplicates(pieces)
    if twice:
        who = " and ".join(f"{name!r} ({first[name]})" for name in twice)
        warnings.warn(f"data: {who} are two authors; are they one?", stacklevel=3)
    return {who: Text(_one_line_end("\n".join(pieces[who])), first[who]) for who in pieces}


def _one_line_end(text: str) -> str:
    """The text with line feeds in the place of carriage returns, as Python reads files: else "\\r" is a character."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _table_rows(at: Path, author: str, column: str, delimiter: str) -> list[tuple[str, str, str]]:
    table = read(at, delimiter)
    who, cells = table.words(author, "author_column"), table.column(column, "text_column")
    if cells.dtype == np.float64:
        raise UserError(f"{at}: column {column!r} (data.text_column) holds numbers, not texts")
    said = text_of(cells)
    for row, name in enumerate(who):
        if not name:
            raise UserError(f"{table.at(row)}: column {author!r} is empty; every text needs an author")
    return [(who[row], said[row], table.at(row)) for row in range(len(table))]


def _json_rows(at: Path, author: str, column: str) -> list[tuple[str, str, str]]:
    rows = []
    for number, line in enumerate(read_text(at).split("\n"), 1):
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
