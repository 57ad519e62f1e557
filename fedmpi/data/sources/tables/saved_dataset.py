"""A data set as Hugging Face's `datasets` saves it: a folder of Arrow files, or one of such a folder for each split."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import gaps_allowed, holdout
from fedmpi.data.sources.tables import arrow
from fedmpi.data.sources.tables.files import Table, ordered
from fedmpi.data.sources.tables.targets import targets

REMEDY = "save it anew with save_to_disk, or correct data.root or data.path"


@dataclass(frozen=True, eq=False)
class Split:
    x: np.ndarray  # (n, ...)
    labels: Table  # columns of labels and of sites
    names: list[str] | None  # of the classes, where the data set tells them


def saved_dataset(
    root: Path,
    *,
    path: str,
    input_column: str | Annotated[list[str], Field(min_length=1)],
    label_column: str = "label",
    site_column: str | None = None,
    symbols: bool = False,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
) -> Dataset:
    """The folder root/path that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote; pyarrow reads it.

    input_column: a column of numbers, of lists of one length, nested ones too, or of pictures of one size; or several
    columns of numbers, side by side. uint8 and pictures are scaled to 0..1, other numbers are taken as they are; with
    symbols they stay whole (for an embedding). label_column: class labels, or numbers (a regression). site_column says
    whose a row is. Of several splits train and, if there, validation are trained on, and test is the test part;
    without it, test_fraction of each class is, the same for every seed.
    """
    folder = root / path
    columns = [input_column] if isinstance(input_column, str) else input_column
    if os.path.isfile(folder / "dataset_dict.json"):
        parts = [name for name in ("train", "validation", "test") if os.path.isdir(folder / name)]
        if "train" not in parts:
            raise UserError(f"{folder} has no split 'train'; {REMEDY}")
    elif os.path.isfile(folder / "state.json"):
        parts = ["."]
    else:
        raise UserError(f"saved_dataset: {folder} holds neither dataset_dict.json nor state.json; {REMEDY}")
    splits = [_read(folder / name, columns, label_column, site_column, symbols) for name in parts]
    for name, split in zip(parts, splits, strict=True):
        if split.x.shape[1:] != splits[0].x.shape[1:]:
            raise UserError(
                f"{folder}: a row of x is {splits[0].x.shape[1:]} in {parts[0]}, {split.x.shape[1:]} in {name}"
            )
    rows = _together([split.labels for split in splits], folder)
    aim = targets(rows, [label_column], "auto", splits[0].names)
    values = torch.from_numpy(np.concatenate([split.x for split in splits]))
    train = np.repeat([name != "test" for name in parts], [len(split.x) for split in splits])
    owner, names = np.zeros(len(rows), dtype=np.int64), []
    if site_column is not None:
        words = rows.words(site_column, "site_column")
        names = ordered(list(words))
        owner = np.array([names.index(word) for word in words], dtype=np.int64)
    if "test" not in parts:
        train[holdout(aim.groups, test_fraction)[1]] = False
    first, last = torch.from_numpy(train), torch.from_numpy(~train)
    site = torch.from_numpy(owner) if names else None
    return Dataset(
        *(values[first], aim.y[first], values[last], aim.y[last], len(aim.names) or 1),
        site=None if site is None else site[first],
        test_site=None if site is None else site[last],
        site_names=tuple(names),
    )


def _read(folder: Path, columns: list[str], label: str, sites: str | None, symbols: bool) -> Split:
    state, info = (_json(folder / name) for name in ("state.json", "dataset_info.json"))
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files") or ()]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing or not files:
        raise UserError(f"{folder}: {missing[0].name if missing else 'an .arrow file'} is not there; {REMEDY}")
    table = arrow.stream(files)
    for name, key in [
        *((name, "input_column") for name in columns),
        (label, "label_column"),
        *([(sites, "site_column")] if sites else []),
    ]:
        if name not in table.column_names:
            raise UserError(f"{folder} has no column {name!r} (data.{key}); {nearest(name, table.column_names)}")
    arrays = [arrow.array(table.column(name), name, folder) for name in columns]
    for name, found in zip(columns, arrays, strict=True):
        if len(columns) > 1 and found.ndim > 1:
            raise UserError(f"{folder}: column {name!r} holds lists; of several columns each is of numbers")
    x = arrays[0] if arrays[0].ndim > 1 else np.stack(arrays, axis=1)
    cells = {name: arrow.cells(table.column(name), name, folder) for name in (label, sites) if name is not None}
    feature = (info.get("features") or {}).get(label) or {}
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    rows = Table(folder, cells, np.arange(len(x)), "row")
    for name in cells:
        if name != label or names is not None or not gaps_allowed():
            _whole(rows, name)
    if names is not None:
        number = rows.columns[label]
        odd = np.flatnonzero((number < 0) | (number >= len(names)))
        if len(odd):
            said = f"column {label!r} holds the label {number[odd[0]]:g}"
            raise UserError(f"{rows.at(odd[0])}: {said}; 0..{len(names) - 1} are allowed")
        rows.columns[label] = np.array([names[int(k)] for k in number], dtype=object)
        rows = replace(rows, named={label: frozenset(names)})
    return Split(_typed(x, symbols, rows), rows, names)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; {REMEDY}") from error
    return found if isinstance(found, dict) else {}


def _whole(rows: Table, name: str) -> None:
    for row, word in enumerate(rows.words(name, "label")):
        if not word:
            raise UserError(f"{rows.at(row)}: column {name!r} is empty; drop the row, or fill it")


def _typed(x: np.ndarray, symbols: bool, rows: Table) -> np.ndarray:
    if symbols:
        if x.dtype.kind not in "iu":
            raise UserError(f"{rows.path}: x holds {x.dtype}; data.symbols needs whole numbers")
        return x.astype(np.int64)
    out = x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)
    bad = ~np.isfinite(out).reshape(len(out), -1).all(1)
    if bad.any():
        raise UserError(
            f"{rows.at(int(bad.argmax()))}: x holds a value that is not finite, or nothing; fill or drop it"
        )
    return out


def _together(tables: list[Table], folder: Path) -> Table:
    columns = {name: np.concatenate([table.columns[name] for table in tables]) for name in tables[0].columns}
    named = {name: words for table in tables for name, words in table.named.items()}
    return Table(folder, columns, np.concatenate([table.places for table in tables]), "row", named=named)
