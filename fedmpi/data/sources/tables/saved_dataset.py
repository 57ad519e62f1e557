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
from fedmpi.data.pictures import Pictures, of_bytes
from fedmpi.data.preparation import NewRows, Preparation, Request, check_sample, file_of
from fedmpi.data.sources.arrays import ArrayOptions, samples, with_axes
from fedmpi.data.sources.common import PARTS, gaps_allowed
from fedmpi.data.sources.named_arrays import Part, join_parts
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import DecodeOptions, Pages, PixelRange, Size
from fedmpi.data.sources.tables import arrow
from fedmpi.data.sources.tables.files import Table
from fedmpi.data.sources.tables.targets import targets

REMEDY = "save it anew with save_to_disk, or correct data.root or data.path"
ONLY_PICTURES = {"size": None, "channels": None, "pages": "refuse"}  # options, their defaults
ONLY_NUMBERS = {"axes": None, "symbols": False}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one split or of several. names: of the classes, where the data set has them."""

    x: np.ndarray | list[bytes | Path]  # (n, ...) numbers, or images
    labels: Table  # columns of labels and of sites
    names: list[str] | None

    @property
    def is_pictures(self) -> bool:
        return isinstance(self.x, list)


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
    axes: str | None = None,
    val: Literal["join", "leave"] = "join",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> Dataset:
    """The folder root/path that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote; pyarrow reads it.

    input_column: a column of numbers, of lists of one length, nested ones too, or of pictures; or several columns of
    numbers, side by side. uint8 and pictures are scaled to 0..1, other numbers are taken as they are; with symbols they
    stay whole (for an embedding). label_column: class labels, or numbers (a regression). site_column says whose a row
    is. Of several splits train and validation (valid, val, dev) are trained on, and test is the test part; without it,
    test_fraction (0.2) of each class is, the same for every seed. val: the validation split joins the training part, or
    is left out.
    axes: of lists nested thrice (Array3D) or four times, such as NHWC; without it 1 or 3 entries of the first or the
    last axis are channels, and other shapes are guessed, with a warning. pixel_range: [low, high], which become 0 and
    1; or file, the least and the largest value of each picture; pictures of more than 8 bits need it. mean, std: one
    number a channel, of pixels in 0..1.
    Of pictures: size: each is scaled and cut at its centre to size x size; without it all must be of one size.
    channels: 1 grey, 3 colour; without it as the first one is. pages: pictures with several pages or frames are
    refused, or their first one is read.
    """
    folder = root / path
    columns = [input_column] if isinstance(input_column, str) else input_column
    splits = _splits(folder, val)
    parts = [_read(folder / name, columns, label_column, site_column) for name in splits]
    rows = _joined(parts, folder)
    options: dict[str, object] = {"size": size, "channels": channels, "pages": pages}
    options |= {"axes": axes, "symbols": symbols}
    for key, default in (ONLY_NUMBERS if rows.is_pictures else ONLY_PICTURES).items():
        if options[key] != default:
            what = f"is for {'numbers' if rows.is_pictures else 'pictures'}, which column {columns[0]!r} does not hold"
            raise UserError(f"{folder}: data.{key}: {options[key]} {what}; leave it out")
    decoding, arrays = None, None
    if isinstance(rows.x, list):
        channels = channels or reading.channels_of_first(rows.x, _places(rows, columns))
        decoding = DecodeOptions(size, channels, mean or (0.0,), std or (1.0,), pixel_range, pages)
    else:
        arrays = ArrayOptions(axes, pixel_range, mean, std)
        arrays = arrays if symbols else with_axes(arrays, rows.x.shape, "x", folder)
    x = _inputs(rows, columns, symbols, decoding, arrays)
    target = targets(rows.labels, [label_column], "auto", rows.names)
    owner, site_names = rows.labels.owners(site_column)
    is_test = np.repeat([PARTS.get(name.lower()) == "test" for name in splits], [len(part.x) for part in parts])
    by_part = {}
    for prefix, mask in (("", ~is_test), ("test_", is_test)):
        if mask.any() or not prefix:
            of_part = torch.from_numpy(mask)
            site = torch.from_numpy(owner)[of_part] if site_names else None
            by_part[prefix] = Part(x[of_part], target.y[of_part], site)
    preparation = SavedPreparation(
        tuple(columns), label_column, symbols, tuple(x.shape[1:]), decoding, arrays, target.names
    )
    data = join_parts(by_part, folder, len(target.names) or 1, test_fraction, preparation)
    return replace(data, site_names=tuple(site_names))


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
        folder = file_of(request, folder=True)
        if os.path.isfile(folder / "dataset_dict.json"):
            folder = folder / "test"
        y, reason = None, ""
        try:
            rows = _read(folder, self.columns, self.label_column, None)
            kind = "class" if self.class_names else "number"
            y = targets(rows.labels, [self.label_column], kind, self.class_names or None).y
        except UserError as error:  # maybe because of the labels
            rows, reason = _read(folder, self.columns, None, None), str(error)
        if rows.is_pictures != (self.decoding is not None):
            needed, given = ("numbers", "pictures") if self.decoding is None else ("pictures", "numbers")
            raise UserError(f"{folder}: column {self.columns[0]!r} holds {given}; the training had {needed} there")
        x = _inputs(rows, self.columns, self.symbols, self.decoding, self.arrays)
        check_sample(x, self.sample, str(folder))
        return NewRows({"row": rows.labels.places}, x, y, no_targets=reason)


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
    unread = [name for name in names if name.lower() not in PARTS]
    if unread:
        warnings.warn(f"data: not read: {', '.join(unread)} of {folder}; parts are {', '.join(PARTS)}", stacklevel=3)
    return [*known["train"], *(known["val"] if val == "join" else ()), *known["test"]]


def _read(folder: Path, columns: Sequence[str], label_column: str | None, site_column: str | None) -> Rows:
    state, info = (_json(folder / file) for file in ("state.json", "dataset_info.json"))
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files") or ()]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing or not files:
        raise UserError(f"{folder}: {missing[0].name if missing else 'an .arrow file'} is not there; {REMEDY}")
    table = arrow.read_stream(files)
    options: dict[str | None, str] = {label_column: "label_column", site_column: "site_column"}
    options |= dict.fromkeys(columns, "input_column")
    for name, key in options.items():
        if name and name not in table.column_names:
            raise UserError(f"{folder} has no column {name!r} (data.{key}); {nearest(name, table.column_names)}")
    images = arrow.pictures(table.column(columns[0]), columns[0], folder) if len(columns) == 1 else None
    x: np.ndarray | list[bytes | Path] = _side_by_side(table, columns, folder) if images is None else images
    cells = {name: arrow.cells(table.column(name)) for name in (label_column, site_column) if name}
    feature = (info.get("features") or {}).get(label_column or "") or {}
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    labels = Table(folder, cells, np.arange(len(x)), "row")
    for column in cells:
        gaps = labels.gaps(column, "label")
        if gaps.any() and (column != label_column or names is not None or not gaps_allowed()):
            raise UserError(f"{labels.at(int(gaps.argmax()))}: column {column!r} is empty; drop the row, or fill it")
    if names is not None and label_column is not None:
        labels = _with_class_names(labels, label_column, names)
    return Rows(x, labels, names)


def _side_by_side(table: Any, columns: Sequence[str], folder: Path) -> np.ndarray:
    """(n, columns) of columns of numbers, or (n, ...) of one column of lists."""
    arrays = [arrow.array(table.column(name), name, folder) for name in columns]
    odd = next((name for name, values in zip(columns, arrays, strict=True) if values.ndim > 1), None)
    if odd is not None and len(columns) > 1:
        raise UserError(f"{folder}: column {odd!r} holds lists; of several columns each is of numbers")
    return arrays[0] if odd is not None else np.stack(arrays, axis=1)


def _with_class_names(labels: Table, column: str, names: Sequence[str]) -> Table:
    """Put the name of its class in the place of each label."""
    numbers = labels.columns[column]
    odd = np.flatnonzero((numbers < 0) | (numbers >= len(names)))
    if len(odd):
        cell = f"{labels.at(odd[0])}: column {column!r} holds the label {numbers[odd[0]]:g}"
        raise UserError(f"{cell}; 0..{len(names) - 1} are allowed")
    words = np.array([names[int(k)] for k in numbers], dtype=object)
    return replace(labels, columns={**labels.columns, column: words}, named={column: frozenset(names)})


def _joined(parts: Sequence[Rows], folder: Path) -> Rows:
    """Join the rows of all splits, one after the other."""
    first = parts[0]
    columns = {name: np.concatenate([part.labels.columns[name] for part in parts]) for name in first.labels.columns}
    places = np.concatenate([part.labels.places for part in parts])
    table = Table(folder, columns, places, "row", named=first.labels.named)
    if isinstance(first.x, list):
        return Rows([file for part in parts for file in part.x], table, first.names)
    arrays = [part.x for part in parts if isinstance(part.x, np.ndarray)]
    if any(x.shape[1:] != arrays[0].shape[1:] for x in arrays):
        raise UserError(f"{folder}: the rows of its splits have different shapes; one is needed")
    return Rows(np.concatenate(arrays), table, first.names)


def _places(rows: Rows, columns: Sequence[str]) -> list[str]:
    return [f"{rows.labels.at(row)}: column {columns[0]!r}" for row in range(len(rows.x))]


def _inputs(
    rows: Rows, columns: Sequence[str], symbols: bool, decoding: DecodeOptions | None, arrays: ArrayOptions | None
) -> Tensor | Pictures:
    """The samples of rows, by the options of pictures or those of numbers."""
    if isinstance(rows.x, list):
        assert decoding is not None
        return of_bytes(reading.read(rows.x, decoding, _places(rows, columns)), decoding.mean, decoding.std)
    assert arrays is not None
    bad = ~np.isfinite(rows.x).reshape(len(rows.x), -1).all(1)
    if bad.any():
        row = rows.labels.at(int(bad.argmax()))
        raise UserError(f"{row}: x holds a value that is not finite, or nothing; fill or drop it")
    if symbols and rows.x.dtype.kind not in "iu":
        raise UserError(f"{rows.labels.path}: x holds {rows.x.dtype}; data.symbols needs whole numbers")
    if symbols:
        return torch.from_numpy(rows.x.astype(np.int64))
    return samples(rows.x, arrays, "x", rows.labels.path, grey=False)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; {REMEDY}") from error
    return content if isinstance(content, dict) else {}
