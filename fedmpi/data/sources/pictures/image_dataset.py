"""Picture files with labels, by folders of classes or by the rows of a CSV file, and the data set that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order, nearest
from fedmpi.data.csv_file import csv_table
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources import common
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import DecodeOptions, is_picture
from fedmpi.data.sources.pictures.preparation import ImagePreparation


@dataclass(frozen=True)
class Files:
    """Picture files with their labels; rows: where each is named ("a.csv, line 7"), for messages; "" if nowhere."""

    paths: Sequence[Path]
    labels: Sequence[int]
    rows: Sequence[str] = ()

    def __add__(self, more: Files) -> Files:
        rows = [row for files in (self, more) for row in files.rows or [""] * len(files.paths)]
        return Files([*self.paths, *more.paths], [*self.labels, *more.labels], rows)


def dataset_of_files(
    files: Files,
    test: Files | float,
    classes: Sequence[str],
    options: DecodeOptions,
    groups: Sequence[str] = (),
) -> Dataset:
    """A data set of picture files.

    test: the files of the test part, or the share of each class that is it, the same for every seed; classes: their
    names, in order; groups: of `files`, what must not be parted, such as the lesion of each picture.
    """
    if isinstance(test, Files):
        in_test = np.arange(len(files.paths) + len(test.paths)) >= len(files.paths)
        files = files + test
    else:
        in_test = np.zeros(len(files.labels), dtype=bool)
        in_test[common.holdout(np.array(files.labels), test, groups)[1]] = True
    images, y = reading.read(files.paths, options, files.rows), torch.tensor(files.labels)
    channels, height, width = (int(size) for size in images.shape[1:])
    preparation = ImagePreparation(options, (channels, height, width), channels, tuple(classes))
    (x, y_train), (test_x, y_test) = (
        (preparation.normalised(images[rows]), y[torch.from_numpy(rows)]) for rows in (~in_test, in_test)
    )
    group = common.number_groups([group for group, out in zip(groups, in_test, strict=False) if not out])
    return Dataset(x, y_train, test_x, y_test, len(classes), preparation=preparation, group=group)


def check_class_names(source: str, names: Sequence[str] | None, site: str | None) -> None:
    """Raise UserError for a name that stands twice in data.class_names, and where a silo has no such list."""
    if names is None and site is not None:
        raise UserError(f"{source}: data.class_names is missing; silos need it, for a site may not have every class")
    twice = next((name for k, name in enumerate(names or ()) if name in (names or ())[:k]), None)
    if twice is not None:
        raise UserError(f"{source}: data.class_names holds {twice!r} twice; each stands once")


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders in natural order, without hidden ones (.ipynb_checkpoints) and macOS's __MACOSX."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; correct its permissions") from error
    return natural_order(name for name in names if not name.startswith((".", "__MACOSX")))


def pictures_by_class(folder: Path, names: Sequence[str], below: str = "", allowed: str = "data.class_names") -> Files:
    """Pictures of folder/CLASS, or folder/CLASS/below, class by class, in the order of their paths.

    Raises UserError for a folder that is no class, and where there is no picture.
    """
    unknown = [name for name in class_folders(folder) if name not in names]
    if unknown:
        raise UserError(f"{folder} holds the class {unknown[0]!r}; the classes are {', '.join(names)} ({allowed})")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = sorted(file for file in (folder / name / below).rglob("*") if is_picture(file) and not file.is_dir())
        paths += files
        labels += [label] * len(files)
    if not paths:
        raise UserError(
            f"{folder} holds no picture in a folder of its class ({', '.join(names) or 'there is no folder'}); correct "
            "data.root or data.path, or put pictures there"
        )
    return Files(paths, labels)


class Row(NamedTuple):
    at: str  # "a.csv, line 7"
    values: dict[str, str]  # of the columns asked for; none is empty


def read_rows(path: Path, columns: Sequence[str], delimiter: str = ",", options: Sequence[str] = ()) -> list[Row]:
    """Rows of `path` with the values of `columns`, spaces around them left out.

    options: the keys of the config that name the columns, for messages.
    Raises UserError, with the line, for a file that cannot be read, a column that is not there, a gap in one.
    """

    def check_header(header: Sequence[str]) -> None:
        for k, name in enumerate(columns):
            if name not in header:
                key = f" (data.{options[k]})" if options else ""
                one_cell = "; is data.delimiter another one?" if len(header) == 1 else ""
                raise UserError(f"{path} has no column {name!r}{key}{one_cell}; {nearest(name, header)}")
            if header.count(name) > 1:
                raise UserError(f"{path} has the column {name!r} twice; rename one")

    header, lines = csv_table(path, delimiter, check_header)
    places = {name: header.index(name) for name in columns}
    rows = []
    for number, line in lines:
        at = f"{path}, line {number}"
        values = {name: line[place].strip() for name, place in places.items()}
        gap = next((name for name, value in values.items() if not value), None)
        if gap is not None:
            raise UserError(f"{at}: the column {gap!r} is empty; fill it, or leave the row out")
        rows.append(Row(at, values))
    if not rows:
        raise UserError(f"{path} holds no row below its header")
    return rows
