"""The data source `saved_dataset`: data sets that Hugging Face `datasets` has saved to disk."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.data.dataset import Dataset
from fedmpi.data.preprocessing import Preparation
from fedmpi.data.sources.arrays import ArrayOptions, convert_samples
from fedmpi.data.sources.images import read_images
from fedmpi.data.sources.images.decode import DecodeOptions, PixelRange, Size
from fedmpi.data.sources.images.image_preprocessing import ImagePreparation
from fedmpi.data.sources.named_arrays import ArrayPart, ArrayPreparation, dataset_from_parts
from fedmpi.data.sources.source_utils import PART_BY_WORD, missing_targets_allowed
from fedmpi.data.sources.tables import arrow
from fedmpi.data.sources.tables.read_table import Table, check_no_missing_cells, read_targets

SAVE_AGAIN = "correct data.root or data.path, or save the data set again with save_to_disk"


def saved_dataset(
    root: Path,
    *,
    path: str,
    input_column: str,
    label_column: str = "label",
    site_column: str | None = None,
    symbols: bool = False,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    mean: tuple[float, ...] | None = None,
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None,
    pixel_range: PixelRange | None = None,
    axes: str | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> Dataset:
    """A data set that Hugging Face `datasets` has saved to root/path with `save_to_disk`; needs pyarrow.

    The training part consists of the splits train and validation (valid, val, dev), the test part of the split test.
    Images and uint8 numbers are scaled to 0..1; other numbers are used as they are.

    path: the folder, relative to data.root.
    input_column: the column with the samples: numbers, lists of equal length, nested lists, or images.
    label_column: the column with class labels, or with numbers (regression targets).
    site_column: the column with the site of each row.
    symbols: true if the samples are symbol numbers, for models that begin with an embedding; they remain integers.
    size: images are scaled and centre-cropped to size x size; without it all images must have the same size.
    channels: 3 for colour, 1 for greyscale images.
    mean: subtracted from the inputs (images: from pixels in 0..1), one number per channel.
    std: the inputs are divided by it after `mean` has been subtracted, one number per channel.
    pixel_range: [low, high], the values that are mapped to 0 and 1, or `file`, to use the smallest and largest value of
    each image.
    It is required for images with more than 8 bits per pixel.
    axes: the axes of lists nested three or four times (Array3D, Array4D), such as NHWC. By default the channels are the
    first or the last axis of a sample if exactly one of these has 1 or 3 entries; any other shape raises an error.
    test_fraction: without a split `test`, the fraction of each class that is held out as the test part, with the same
    rows for every seed; default 0.2.
    """
    folder = root / path
    columns = {label_column: "label_column", site_column: "site_column", input_column: "input_column"}
    named = {name: key for name, key in columns.items() if name is not None}
    splits = read_splits(folder, named, label_column, inputs=[input_column])
    inputs = [arrow.convert_inputs(each.content.column(input_column), input_column, each.folder) for each in splits]
    labels = concatenate_cells(splits, folder)
    row_locations = [f"{labels.row_location(row)}: column {input_column!r}" for row in range(len(labels))]
    names = list(labels.valid_words[label_column]) if label_column in labels.valid_words else None
    target = read_targets(labels, [label_column], "auto", names)
    owner, site_names = labels.encode_sites(site_column)

    preparation: Preparation | None = None
    if isinstance(inputs[0], list):
        if axes is not None or symbols:
            key = "symbols" if symbols else "axes"
            raise UserError(
                f"{folder}: data.{key} is for numbers, but column {input_column!r} contains images; remove data.{key}"
            )
        files = [file for files in inputs for file in files]
        decoding = DecodeOptions(size, channels, mean or (0.0,), std or (1.0,), pixel_range)
        images = read_images.decode_images(files, decoding, row_locations)
        shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
        preparation = ImagePreparation(decoding, shape, shape[0], target.names)
        x: Any = preparation.normalize(images)
    else:
        if size is not None:
            raise UserError(
                f"{folder}: data.size is for images, but column {input_column!r} contains numbers; remove data.size"
            )
        options = None if symbols else ArrayOptions(axes, pixel_range, mean, std)
        x, preparation = _convert_numeric_samples(inputs, options, labels, target.names)
    is_test = torch.from_numpy(parts_of_rows(splits) == "test")
    by_part = {}
    for prefix, rows in (("", ~is_test), ("test_", is_test)):
        if rows.any() or not prefix:
            by_part[prefix] = ArrayPart(x[rows], target.y[rows], torch.from_numpy(owner)[rows] if site_names else None)
    data = dataset_from_parts(by_part, folder, len(target.names) or 1, test_fraction, preparation)
    return replace(data, site_names=tuple(site_names))


def _convert_numeric_samples(
    parts: Sequence[np.ndarray], options: ArrayOptions | None, labels: Table, class_names: tuple[str, ...]
) -> tuple[Any, Preparation | None]:
    """Convert the samples of all splits, and return them with their preparation.

    Args:
        parts: the samples of each split.
        options: how samples are converted; None: they are symbols, and remain integers.
        labels: the labels of all splits, for messages.
        class_names: the names of the classes.
    """
    folder = labels.path
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise UserError(f"{folder}: the rows of its splits have different shapes; they must have the same shape")
    array = np.concatenate(parts)
    bad = ~np.isfinite(array).reshape(len(array), -1).all(1)
    if bad.any():
        location = labels.row_location(int(bad.argmax()))
        raise UserError(f"{location}: x contains a missing or non-finite value; correct it, or drop the row")
    if options is None:
        if array.dtype.kind not in "iu":
            raise UserError(f"{folder}: x contains {array.dtype}, but data.symbols: true needs integers")
        return torch.from_numpy(array.astype(np.int64)), None
    preparation = ArrayPreparation(array.shape[1:], array.dtype == np.uint8, options, class_names)
    return convert_samples(array, options, "x", folder, grey=False), preparation


def _find_splits(folder: Path) -> list[str]:
    """Return the names of the splits to read, ["."] for a data set without splits; warn about other splits."""
    if os.path.isfile(folder / "state.json"):
        return ["."]
    if not os.path.isfile(folder / "dataset_dict.json"):
        raise UserError(f"{folder} contains neither dataset_dict.json nor state.json; {SAVE_AGAIN}")
    names = [str(name) for name in _read_json(folder / "dataset_dict.json").get("splits") or ()]
    known = {
        part: [name for name in names if PART_BY_WORD.get(name.lower()) == part] for part in ("train", "val", "test")
    }
    if not known["train"]:
        raise UserError(f"{folder} has no split 'train'; its splits: {', '.join(names) or 'none'}; {SAVE_AGAIN}")
    unread = [name for name in names if name.lower() not in PART_BY_WORD]
    if unread:
        warnings.warn(
            f"data: {folder}: ignored splits: {', '.join(unread)}; known names: {', '.join(PART_BY_WORD)}", stacklevel=3
        )
    return [*known["train"], *known["val"], *known["test"]]


class SavedSplit(NamedTuple):
    """One split of a saved data set.

    Attributes:
        part: train, val or test.
        folder: the folder of the split.
        content: the pyarrow table of all columns.
        cells: some of the columns, as a `Table`.
    """

    part: str
    folder: Path
    content: Any
    cells: Table


def read_splits(
    folder: Path,
    columns: Mapping[str, str],
    label_column: str | None,
    *,
    texts: Sequence[str] = (),
    inputs: Sequence[str] = (),
) -> list[SavedSplit]:
    """Read the training, validation and test splits of a saved data set, in this order.

    Args:
        columns: a dict from each column that must exist to the option that names it.
        label_column: the column with the labels. Labels may be missing if `task.ignore` is nan. Class numbers are
            replaced by class names.
        texts: the text columns, which may have empty cells.
        inputs: the columns that are not converted to cells of a `Table`.
    """
    return [_read_split(name, folder, columns, label_column, texts, inputs) for name in _find_splits(folder)]


def _read_split(
    name: str,
    data_set: Path,
    columns: Mapping[str, str],
    label_column: str | None,
    texts: Sequence[str],
    inputs: Sequence[str],
) -> SavedSplit:
    """Read the split in data_set/name; see `read_splits`."""
    folder = data_set / name
    state, info = (_read_json(folder / file) for file in ("state.json", "dataset_info.json"))
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files") or ()]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing or not files:
        raise UserError(f"{folder}: {missing[0].name if missing else 'an .arrow file'} is missing; {SAVE_AGAIN}")
    content = arrow.read_arrow_streams(files)
    for column, key in columns.items():
        if column not in content.column_names:
            known = suggest_name(column, content.column_names)
            raise UserError(f"{folder} has no column {column!r} (data.{key}); {known}")
    converted = {column: arrow.convert_cells(content.column(column)) for column in columns if column not in inputs}
    cells = Table(folder, converted, np.arange(len(content)), "row")
    feature = (info.get("features") or {}).get(label_column) or {}
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    may_lack = {*texts} | ({label_column} if names is None and missing_targets_allowed() else set())
    check_no_missing_cells(cells, [column for column in converted if column not in may_lack])
    if names is not None and label_column is not None:
        cells = _replace_class_numbers(cells, label_column, names)
    return SavedSplit(PART_BY_WORD.get(name.lower(), "train"), folder, content, cells)


def _replace_class_numbers(labels: Table, column: str, names: Sequence[str]) -> Table:
    """Replace the class numbers in a column by the names of the classes."""
    numbers = labels.columns[column]
    invalid = np.flatnonzero((numbers < 0) | (numbers >= len(names)))
    if len(invalid):
        cell = f"{labels.row_location(invalid[0])}: column {column!r} contains the label {numbers[invalid[0]]:g}"
        raise UserError(f"{cell}; labels must be from 0 to {len(names) - 1}")
    names_of_rows = np.array([names[int(k)] for k in numbers], dtype=object)
    return replace(labels, columns={**labels.columns, column: names_of_rows}, valid_words={column: names})


def concatenate_cells(splits: Sequence[SavedSplit], folder: Path) -> Table:
    """Concatenate the cells of all splits."""
    parts = [each.cells for each in splits]
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return replace(
        parts[0], path=folder, columns=columns, row_numbers=np.concatenate([part.row_numbers for part in parts])
    )


def parts_of_rows(splits: Sequence[SavedSplit]) -> np.ndarray:
    """Return the part of each row of the concatenated splits, (n,): train, val or test."""
    return np.repeat([each.part for each in splits], [len(each.cells) for each in splits])


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file; return {} if it does not contain an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; {SAVE_AGAIN}") from error
    return content if isinstance(content, dict) else {}
