"""Files of texts by author: a table of them, JSON lines, a folder of .txt files, or one of these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.csv_file import text_of
from fedmpi.data.sources.hdf5 import open_file
from fedmpi.data.sources.tables.files import Table, in_memory, read


class Text(NamedTuple):
    """What one author wrote, in order of time, and where it stands, for messages."""

    text: str
    place: str


def texts_of(at: Path, author_column: str, text_column: str, delimiter: str) -> dict[str, Text]:
    """Read the text of each author in a file, or in a folder of .txt files."""
    ending = at.suffix.lower()
    if at.is_dir():
        files = sorted(file for file in at.iterdir() if file.suffix.lower() == ".txt" and file.name[0] != ".")
        if not files:
            raise UserError(f"{at} holds no file *.txt; all that an author wrote is expected in one AUTHOR.txt")
        return {file.stem: Text(read_text(file), str(file)) for file in files}
    if ending == ".txt":
        return {at.stem: Text(read_text(at), str(at))}
    if ending in (".h5", ".hdf5"):
        return _hdf5_texts(at)
    table = _json_lines(at) if ending in (".jsonl", ".ndjson") else read(at, delimiter)
    return _joined(_rows(table, author_column, text_column))


def read_text(file: Path) -> str:
    """Read a text in UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")  # -sig: the mark with which some editors begin a file
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as text in UTF-8: {error}; save it as UTF-8") from error


def _hdf5_texts(at: Path) -> dict[str, Text]:
    """Read the snippets of each client of TensorFlow Federated's Shakespeare, joined by a line feed."""
    clients = open_file(at).get("examples", {})
    texts = {name: clients[name].get("snippets") for name in clients}
    if not texts or any(snippets is None or snippets.dtype.kind != "O" for snippets in texts.values()):
        raise UserError(f"{at} has no texts examples/CLIENT/snippets; arrays are read by data.source: hdf5")
    return {name: Text("\n".join(texts[name].asstr()[()]), f"{at}, client {name}") for name in texts}


def _joined(rows: Iterable[tuple[str, str, str]]) -> dict[str, Text]:
    """Join the texts of each author by line feeds, which also replace carriage returns. rows: (author, text, place)"""
    pieces: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for author, piece, place in rows:
        pieces.setdefault(author, []).append(piece)
        places.setdefault(author, place)
    texts = {author: "\n".join(pieces[author]).replace("\r\n", "\n").replace("\r", "\n") for author in pieces}
    return {author: Text(text, places[author]) for author, text in texts.items()}


def _rows(table: Table, author_column: str, text_column: str) -> Iterator[tuple[str, str, str]]:
    authors, cells = table.words(author_column, "author_column"), table.column(text_column, "text_column")
    if cells.dtype == np.float64:
        raise UserError(f"{table.path}: column {text_column!r} (data.text_column) holds numbers, not texts")
    for row, (author, text) in enumerate(zip(authors, text_of(cells), strict=True)):
        if not author:
            raise UserError(f"{table.at(row)}: column {author_column!r} is empty; every text needs an author")
        yield author, text, table.at(row)


def _json_lines(at: Path) -> Table:
    rows, places = [], []
    for number, line in enumerate(read_text(at).split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise UserError(f"{at}, line {number} is no JSON: {error}; one object a line is needed") from error
        places += [number] if line.strip() else []
    return replace(in_memory(rows), path=at, places=np.array(places), unit="line")
