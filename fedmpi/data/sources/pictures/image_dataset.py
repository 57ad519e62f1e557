"""Picture files with labels, by folders of classes or by the rows of a CSV file, and the data set that they become."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, natural_order, shorten
from fedmpi.data.csv_file import csv_table
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources import common
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import DecodeOptions, is_picture
from fedmpi.data.sources.pictures.preparation import ImagePreparation
from fedmpi.data.streaming import Stream

Part = tuple[np.ndarray | Stream, torch.Tensor]  # images and labels


@dataclass(frozen=True)
class Files:
    """Picture files with their labels; rows: where each is named ("a.csv, line 7"), for messages; "" if nowhere."""

    paths: Sequence[Path]
    labels: Sequence[int]
    rows: Sequence[str] = ()

    def __add__(self, more: Files) -> Files:
        rows = [row for files in (self, more) for row in files.rows or [""] * len(files.paths)]
        return Files([*self.paths, *more.paths], [*self.labels, *more.labels], rows)


def dataset_of_parts(
    train: Files, test: Files, classes: Sequence[str], options: DecodeOptions, groups: Sequence[str] = ()
) -> Dataset:
    """A data set whose test part is given. classes: their names, in order; groups: of the training files."""
    both = train + test
    images = reading.read(both.paths, options, both.rows)
    y, n = torch.tensor(both.labels), len(train.paths)
    found = _dataset((images[:n], y[:n]), (images[n:], y[n:]), classes, options)
    return replace(found, group=common.number_groups(groups))


def check_site(data: Dataset, name: str, at: str, classes: Sequence[str], small: str) -> Dataset:
    """The data of a site; with `refuse`, UserError for one training picture, or pictures of one class alone."""
    seen = data.train_y.unique()
    if small == "keep" or (len(data.train_y) > 1 and len(seen) > 1):
        return data
    many = count(len(data.train_y), "training picture")
    has = f"{many} of one class, {classes[int(seen[0])]!r}" if len(data.train_y) > 1 else many
    raise UserError(f"{at}: site {name!r}, which begins there, has {has}; say data.small_sites: keep, or leave it out")


def dataset_with_test_part(
    files: Files, fraction: float, classes: Sequence[str], options: DecodeOptions, groups: Sequence[str] = ()
) -> Dataset:
    """A data set with `fraction` of each class as test part, the same for every seed.

    classes: their names, in order; groups: what must not be parted, such as the lesion of each picture.
    """
    labels = np.array(files.labels)
    held = np.zeros(len(labels), dtype=bool)
    held[common.holdout(labels, fraction, groups)[1]] = True
    images = reading.read(files.paths, options, files.rows)
    y = torch.from_numpy(labels)
    parts = [(images[rows], y[torch.from_numpy(rows)]) for rows in (~held, held)]
    found = _dataset(parts[0], parts[1], classes, options)
    return replace(found, group=common.number_groups([g for g, out in zip(groups, held, strict=False) if not out]))


def _dataset(train: Part, test: Part, classes: Sequence[str], options: DecodeOptions) -> Dataset:
    (x, y), (test_x, test_y) = train, test
    channels, height, width = (int(size) for size in x.shape[1:])
    made = ImagePreparation(options, (channels, height, width), channels, tuple(classes))
    return Dataset(made.normalised(x), y, made.normalised(test_x), test_y, len(classes), preparation=made)


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders in natural order, without hidden ones (.ipynb_checkpoints) and macOS's __MACOSX."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; correct its permissions") from error
    return natural_order(name for name in names if not name.startswith((".", "__MACOSX")))


def pictures_by_class(folder: Path, names: Sequence[str], below: str = "", allowed: str = "data.class_names") -> Files:
    """Pictures of folder/CLASS, or folder/CLASS/below, class by class, in the order of their paths.

    Raises UserError for a folder that is no class, and where there is no picture; a class's folder without one is told.
    """
    unknown = [name for name in class_folders(folder) if name not in names]
    if unknown:
        raise UserError(f"{folder} holds the class {unknown[0]!r}; the classes are {', '.join(names)} ({allowed})")
    paths: list[Path] = []
    labels: list[int] = []
    bare: list[Path] = []
    for label, name in enumerate(names):
        there = sorted(file for file in (folder / name / below).rglob("*") if is_picture(file))
        lost = next((file for file in there if file.is_symlink() and not file.exists()), None)
        if lost is not None:
            raise UserError(f"{lost} is a link to {os.readlink(lost)}, which is not there; fetch it, or remove it")
        found = [file for file in there if file.is_file()]
        paths += found
        labels += [label] * len(found)
        if not found and (folder / name).is_dir():
            bare.append(folder / name)
    if not paths:
        raise UserError(
            f"{folder} holds no picture in a folder of its class ({', '.join(names) or 'there is no folder'}); correct "
            "data.root or data.path, or put pictures there"
        )
    for place in bare:
        warnings.warn(f"{place} holds no picture; put some there, or remove the folder", stacklevel=2)
    return Files(paths, labels)


class Row(NamedTuple):
    at: str  # "a.csv, line 7"
    values: dict[str, str]  # of the columns asked for; none is empty


def read_rows(path: Path, columns: Sequence[str], delimiter: str = ",", options: Sequence[str] = ()) -> list[Row]:
    """Rows of `path` with the values of `columns`, spaces around them left out.

    options: the keys of the config that name the columns, for messages.
    Raises UserError, with the line, for a file that cannot be read, a column that is not there, a gap in one.
    """
    header, lines = csv_table(path, delimiter, lambda names: _check_header(path, names, columns, delimiter, options))
    places = {name: header.index(name) for name in columns}
    found = []
    for number, line in lines:
        at = f"{path}, line {number}"
        values = {name: line[place].strip() for name, place in places.items()}
        gap = next((name for name, value in values.items() if not value), None)
        if gap is not None:
            raise UserError(f"{at}: the column {gap!r} is empty; fill it, or leave the row out")
        found.append(Row(at, values))
    if not found:
        raise UserError(f"{path} holds no row below its header")
    return found


def _check_header(
    path: Path, header: Sequence[str], columns: Sequence[str], delimiter: str, options: Sequence[str]
) -> None:
    for k, name in enumerate(columns):
        if name not in header:
            other = next((mark for mark in ";\t|," if mark != delimiter and mark in header[0]), None)
            hint = f"; is the delimiter {other!r}? data.delimiter" if len(header) == 1 and other else ""
            key = f" (data.{options[k]})" if options else ""
            there = shorten(", ".join(header), 200)
            meant = next((f"; did you mean {other!r}?" for other in header if other.casefold() == name.casefold()), "")
            raise UserError(f"{path} has no column {name!r}{key}; it has {there}{hint}{meant}")
        if header.count(name) > 1:
            raise UserError(f"{path} has the column {name!r} twice; rename one")
