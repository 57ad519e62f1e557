"""A data set as Hugging Face's `datasets` saves it: a folder of Arrow files, or one of such a folder for each split."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest
from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_of_row_numbers
from fedmpi.data.pictures import Pictures, of_bytes
from fedmpi.data.preparation import NewRows, Preparation, Request, check_sample, file_of
from fedmpi.data.sources.arrays import ArrayOptions, samples, with_axes
from fedmpi.data.sources.common import PARTS, gaps_allowed, holdout
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import DecodeOptions, Pages, PixelRange, Size
from fedmpi.data.sources.tables import arrow
from fedmpi.data.sources.tables.files import Table
from fedmpi.data.sources.tables.sites import row_owners
from fedmpi.data.sources.tables.targets import targets

REMEDY = "save it anew with save_to_disk, or correct data.root or data.path"


@dataclass(frozen=True, eq=False)
class Split:
    name: str
    x: np.ndarray | list[bytes | Path]  # (n, ...) numbers, or images
    labels: Table  # columns of labels and of sites
    names: list[str] | None  # of the classes, where the data set has them


@dataclass(frozen=True)
class SavedPreparation(Preparation):
    """The columns of a saved data set that are the inputs, and the options by which they are read.

    sample: the shape of one as a model sees it; decoding: options of images; arrays: options of numbers.
    """

    columns: tuple[str, ...]
    label_column: str
    symbols: bool
    sample: tuple[int, ...]
    decoding: DecodeOptions | None
    arrays: ArrayOptions | None
    class_names: tuple[str, ...] = ()

    kind: ClassVar[str] = "saved_dataset"

    def read(self, request: Request) -> NewRows:
        """Read a folder as `Dataset.save_to_disk` writes it, or the split `test` of one with splits."""
        folder, split, reason = file_of(request, folder=True), ".", ""
        if os.path.isfile(folder / "dataset_dict.json"):
            split = "test"
            if not os.path.isdir(folder / split):
                raise UserError(f"{folder} has no split 'test'; name the folder of a split, such as {folder / 'NAME'}")
        try:
            new = _read(folder, split, self.columns, self.label_column, None)
        except UserError as error:  # maybe because of the labels
            new, reason = _read(folder, split, self.columns, None, None), str(error)
        if isinstance(new.x, list) != (self.decoding is not None):
            needed, given = ("numbers", "pictures") if self.decoding is None else ("pictures", "numbers")
            raise UserError(f"{folder}: column {self.columns[0]!r} holds {given}; the training had {needed} there")
        x: Tensor | Pictures
        if self.decoding is not None:
            x = _images([new], folder, self.columns[0], self.decoding)
        else:
            assert self.arrays is not None
            x = _numbers([new], folder, self.symbols, self.arrays)
        check_sample(x, self.sample, str(folder))
        y = None
        if not reason:
            try:
                kind = "class" if self.class_names else "number"
                y = targets(new.labels, [self.label_column], kind, self.class_names or None).y
            except UserError as error:
                reason = str(error)
        return NewRows({"row": new.labels.places}, x, y, no_targets=reason)


def saved_dataset(
    root: Path,
    *,
    path: str,
    input_column: str | Annotated[list[str], Field(min_length=1)],
    label_column: str = "label",
    site_column: str | None = None,
    symbols: bool = False,
    size: Size | None = None,
    channels: Literal[1, 3] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None,
    pixel_range: PixelRange | None = None,
    pages: Pages = "refuse",
    background: str = "white",
    axes: str | None = None,
    val: Literal["join", "leave"] = "join",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
) -> Dataset:
    """The folder root/path that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote; pyarrow reads it.

    input_column: a column of numbers, of lists of one length, nested ones too, or of pictures; or several columns of
    numbers, side by side. uint8 and pictures are scaled to 0..1, other numbers are taken as they are; with symbols they
    stay whole (for an embedding). label_column: class labels, or numbers (a regression). site_column says whose a row
    is. Of several splits train and validation (valid, val, dev) are trained on, and test is the test part; without it,
    test_fraction of each class is, the same for every seed. val: the validation split joins the training part, or is
    left out.
    axes: of lists nested thrice (Array3D) or four times, such as NHWC; without it 1 or 3 entries of the first or the
    last axis are channels, and other shapes are guessed, with a warning. pixel_range: [low, high], which become 0 and
    1; or file, the least and the largest value of each picture; pictures of more than 8 bits need it. mean, std: one
    number a channel, of pixels in 0..1.
    Of pictures: size: each is scaled and cut at its centre to size x size; without it all must be of one size.
    channels: 1 grey, 3 colour; without it as the first one is. pages: of pictures with several pages or frames; refuse;
    first; or channels, all of them, one page after the other. background: the colour over which transparent pixels are
    blended.
    """
    folder = root / path
    columns = [input_column] if isinstance(input_column, str) else input_column
    splits = [_read(folder, name, columns, label_column, site_column) for name in _splits(folder, val)]
    rows = _together([split.labels for split in splits], folder)
    decoding, arrays = None, None
    values: Tensor | Pictures
    is_pictures = isinstance(splits[0].x, list)
    others: dict[str, tuple[Any, Any]] = {"axes": (axes, None), "symbols": (symbols, False)}
    if not is_pictures:  # options of the other kind of column, with their defaults
        others = {"size": (size, None), "channels": (channels, None)}
        others |= {"pages": (pages, "refuse"), "background": (background, "white")}
    for key, (value, default) in others.items():
        if value != default:
            what = f"is for {'numbers' if is_pictures else 'pictures'}, which column {columns[0]!r} does not hold"
            raise UserError(f"{folder}: data.{key}: {value} {what}; leave it out")
    if is_pictures:
        channels = channels or reading.channels_of_first(*_files(splits, folder, columns[0]))
        decoding = DecodeOptions(size, channels, mean or (0.0,), std or (1.0,), pixel_range, pages, background)
        values = _images(splits, folder, columns[0], decoding)
    else:
        if not symbols:
            split_of_row = np.repeat(np.arange(len(splits)), [len(split.x) for split in splits])
            warn_of_row_numbers(folder, _named_columns(splits, columns), split_of_row)
        arrays = ArrayOptions(axes, pixel_range, mean, std)
        arrays = arrays if symbols else with_axes(arrays, np.asarray(splits[0].x).shape, "x", folder)
        values = _numbers(splits, folder, symbols, arrays)
    aim = targets(rows, [label_column], "auto", splits[0].names)
    train = np.repeat([PARTS.get(split.name.lower()) != "test" for split in splits], [len(split.x) for split in splits])
    owner, names = row_owners(rows, site_column, None)
    if train.all():
        train[holdout(aim.groups, test_fraction)[1]] = False
    first, last = torch.from_numpy(train), torch.from_numpy(~train)
    site = torch.from_numpy(owner) if names else None
    return Dataset(
        *(values[first], aim.y[first], values[last], aim.y[last], len(aim.names) or 1),
        site=None if site is None else site[first],
        test_site=None if site is None else site[last],
        site_names=tuple(names),
        preparation=SavedPreparation(
            tuple(columns), label_column, symbols, tuple(values.shape[1:]), decoding, arrays, aim.names
        ),
    )


def _splits(folder: Path, val: str) -> list[str]:
    """Return the splits to read, "." for a data set without splits; warn of those that are no part."""
    if os.path.isfile(folder / "state.json"):
        return ["."]
    if not os.path.isfile(folder / "dataset_dict.json"):
        raise UserError(f"saved_dataset: {folder} holds neither dataset_dict.json nor state.json; {REMEDY}")
    names = [str(name) for name in _json(folder / "dataset_dict.json").get("splits") or ()]
    known = {part: [name for name in names if PARTS.get(name.lower()) == part] for part in ("train", "val", "test")}
    if not known["train"]:
        raise UserError(f"{folder} has no split 'train', but {', '.join(names) or 'none'}; {REMEDY}")
    left = [name for name in names if name.lower() not in PARTS]
    if left:
        which = f"the split{'s' if len(left) > 1 else ''} {', '.join(left)} of {folder}"
        warnings.warn(f"data: not read: {which}; parts are named {', '.join(PARTS)}", stacklevel=3)
    return [*known["train"], *(known["val"] if val == "join" else ()), *known["test"]]


def _read(home: Path, name: str, columns: Sequence[str], label: str | None, sites: str | None) -> Split:
    folder = home / name
    state, info = (_json(folder / file) for file in ("state.json", "dataset_info.json"))
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files") or ()]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing or not files:
        raise UserError(f"{folder}: {missing[0].name if missing else 'an .arrow file'} is not there; {REMEDY}")
    table = arrow.read_stream(files)
    for column, key in [
        *((column, "input_column") for column in columns),
        *([(label, "label_column")] if label else []),
        *([(sites, "site_column")] if sites else []),
    ]:
        if column not in table.column_names:
            raise UserError(f"{folder} has no column {column!r} (data.{key}); {nearest(column, table.column_names)}")
    x: np.ndarray | list[bytes | Path]
    images = arrow.pictures(table.column(columns[0]), columns[0], folder) if len(columns) == 1 else None
    if images is not None:
        x = images
    else:
        arrays = [arrow.array(table.column(column), column, folder) for column in columns]
        for column, values in zip(columns, arrays, strict=True):
            if len(columns) > 1 and values.ndim > 1:
                raise UserError(f"{folder}: column {column!r} holds lists; of several columns each is of numbers")
        x = arrays[0] if arrays[0].ndim > 1 else np.stack(arrays, axis=1)
    cells = {column: arrow.cells(table.column(column), column, folder) for column in (label, sites) if column}
    feature = (info.get("features") or {}).get(label or "") or {}
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    rows = Table(folder, cells, np.arange(len(x)), "row")
    for column in cells:
        gaps = rows.gaps(column, "label")
        if gaps.any() and (column != label or names is not None or not gaps_allowed()):
            raise UserError(f"{rows.at(int(gaps.argmax()))}: column {column!r} is empty; drop the row, or fill it")
    if names is not None and label is not None:
        number = rows.columns[label]
        odd = np.flatnonzero((number < 0) | (number >= len(names)))
        if len(odd):
            cell = f"{rows.at(odd[0])}: column {label!r} holds the label {number[odd[0]]:g}"
            raise UserError(f"{cell}; 0..{len(names) - 1} are allowed")
        rows.columns[label] = np.array([names[int(k)] for k in number], dtype=object)
        rows = replace(rows, named={label: frozenset(names)})
    return Split(name, x, rows, names)


def _named_columns(splits: Sequence[Split], columns: Sequence[str]) -> list[tuple[str, np.ndarray]]:
    """Return the columns of numbers by name, all splits together; those of one column of lists are called name[k]."""
    parts = [np.asarray(split.x) for split in splits]
    if any(part.ndim != 2 or part.shape[1] != parts[0].shape[1] for part in parts):
        return []
    x = np.concatenate(parts)
    names = columns if len(columns) == x.shape[1] else [f"{columns[0]}[{k}]" for k in range(x.shape[1])]
    return list(zip(names, x.T, strict=True))


def _files(splits: Sequence[Split], folder: Path, column: str) -> tuple[list[bytes | Path], list[str]]:
    """The images of all splits, one after the other, and where each is, for messages."""
    files = [file for split in splits for file in split.x]
    rows = [(split.name, row) for split in splits for row in range(len(split.x))]
    return files, [f"{folder / name}, row {row}: column {column!r}" for name, row in rows]


def _images(splits: Sequence[Split], folder: Path, column: str, options: DecodeOptions) -> Pictures:
    files, at = _files(splits, folder, column)
    reading.warn_of_depths(files, options, at)
    return of_bytes(reading.read(files, options, at), options.mean, options.std)


def _numbers(splits: list[Split], folder: Path, symbols: bool, options: ArrayOptions) -> Tensor | Pictures:
    """The samples of all splits, one after the other."""
    arrays = [np.asarray(split.x) for split in splits]
    for split, x in zip(splits, arrays, strict=True):
        if x.shape[1:] != arrays[0].shape[1:]:
            shapes = f"{arrays[0].shape[1:]} in {splits[0].name}, {x.shape[1:]} in {split.name}"
            raise UserError(f"{folder}: a row of x is {shapes}")
        if symbols and x.dtype.kind not in "iu":
            raise UserError(f"{folder / split.name}: x holds {x.dtype}; data.symbols needs whole numbers")
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        if bad.any():
            row = split.labels.at(int(bad.argmax()))
            raise UserError(f"{row}: x holds a value that is not finite, or nothing; fill or drop it")
    values = np.concatenate(arrays)
    if symbols:
        return torch.from_numpy(values.astype(np.int64))
    return samples(values, options, "x", folder, grey=False)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; {REMEDY}") from error
    return content if isinstance(content, dict) else {}


def _together(tables: list[Table], folder: Path) -> Table:
    columns = {name: np.concatenate([table.columns[name] for table in tables]) for name in tables[0].columns}
    named = {name: words for table in tables for name, words in table.named.items()}
    return Table(folder, columns, np.concatenate([table.places for table in tables]), "row", named=named)
