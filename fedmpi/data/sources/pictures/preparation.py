"""How image files become inputs, those of the training and new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.data.csv_file import text_of
from fedmpi.data.pictures import Pictures, of_bytes
from fedmpi.data.preparation import NewRows, Preparation, Request, file_of, files_of
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import DecodeOptions, is_picture
from fedmpi.data.sources.tables.files import Table
from fedmpi.data.sources.tables.files import read as read_table
from fedmpi.data.streaming import Stream

TABLES = (".csv", ".tsv", ".tab", ".parquet")
TAKES = "a picture, a folder of them, a CSV file that names them, or a list of files"


@dataclass(frozen=True)
class ImagePreparation(Preparation):
    """How images are decoded, and normalised when they are read.

    stored: (C, H, W) of a decoded image; channels: to which C = 1 is repeated; picture_column, label_column, delimiter,
    folder: of a CSV file that names pictures, relative to its own folder or to `folder` there.
    """

    decoding: DecodeOptions
    stored: tuple[int, int, int]
    channels: int
    class_names: tuple[str, ...] = ()
    picture_column: str = "path"
    label_column: str = "label"
    delimiter: str = ","
    folder: str = "."

    kind: ClassVar[str] = "images"

    def normalised(self, images: np.ndarray | Stream) -> Pictures:
        """What a model sees of decoded images (n, C, H, W): uint8, or float32 in 0..1."""
        return of_bytes(images, self.decoding.mean, self.decoding.std, self.channels)

    def read(self, request: Request) -> NewRows:
        ids, files, labels, where = self._files(request)
        reading.warn_of_depths(files, self.decoding, where)
        images = reading.read(files, self.decoding, where)
        if tuple(images.shape[1:]) != self.stored:
            channels, height, width = images.shape[1:]
            c, h, w = self.stored
            raise UserError(
                f"{files[0]}: images of {width}x{height} pixels and {channels} channels; those of the training were "
                f"{w}x{h} with {c}, and without data.size none is scaled"
            )
        x = self.normalised(images)
        if not labels:
            return NewRows(ids, x)
        number = {name: k for k, name in enumerate(self.class_names)}
        odd = [k for k, label in enumerate(labels) if label not in number]
        if not odd:
            return NewRows(ids, x, torch.tensor([number[label] for label in labels]))
        at = f"{where[odd[0]]}: " if where else f"{files[odd[0]]}: "
        said = f"{at}{labels[odd[0]]!r} is no class of the training"
        if len(odd) == len(labels):
            return NewRows(ids, x, no_targets=said)
        y = torch.tensor([number.get(label, 0) for label in labels])
        known = torch.tensor([label in number for label in labels])
        said = f"{said}; {count(len(odd), 'row')} of {len(labels)} left out"
        return NewRows(ids, x, y, no_targets=said, known=known)

    def _files(self, request: Request) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
        """(columns that say which file, the files, their labels if they are known, where each is named)."""
        if isinstance(request.rows, Sequence) and not isinstance(request.rows, str):
            files = files_of(request.rows, TAKES)
            return {"file": np.array([str(file) for file in files], dtype=object)}, files, [], []
        path = file_of(request, folder=True, takes=TAKES)
        if path.is_file() and path.suffix.lower() in TABLES:
            return self._named_in(read_table(path, self.delimiter), request.ids)
        if request.ids:
            raise UserError(f"{path} has no columns to copy; a CSV file that names pictures has")
        if path.is_file():
            return {"file": np.array([path.name], dtype=object)}, [path], [], []
        files = sorted(file for file in path.rglob("*") if is_picture(file) and file.is_file())
        if not files:
            raise UserError(f"{path} holds no picture")
        names = [file.relative_to(path) for file in files]
        known = all(len(name.parts) > 1 and name.parts[0] in self.class_names for name in names)
        return {"file": np.array(list(map(str, names)), dtype=object)}, files, [n.parts[0] for n in names] * known, []

    def _named_in(self, table: Table, ids: Sequence[str]) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
        names = text_of(table.column(self.picture_column, "picture_column"))
        where = [table.at(row) for row in range(len(table))]
        gap = next((row for row, name in enumerate(names) if not str(name).strip()), None)
        if gap is not None:
            raise UserError(f"{where[gap]}: column {self.picture_column!r} is empty")
        home = table.path.parent
        files = [self._place(home, str(name).strip().replace("\\", "/")) for name in names]
        lost = next((row for row, file in enumerate(files) if not file.exists()), None)
        if lost is not None:
            places = dict.fromkeys(str(folder) for folder in (home / self.folder, home))
            raise UserError(
                f"{where[lost]}: there is no picture {str(names[lost]).strip()}{reading.with_ending(files[lost])} in "
                f"{' or '.join(places)}: names are relative to the folder of {table.path.name}, not to the run's "
                "data.root; write them so, or whole (/.../a.png), or put the file there"
            )
        found = {table.unit: table.places, "file": names} | {name: text_of(table.column(name, "--id")) for name in ids}
        has_labels = self.label_column in table.columns
        labels = text_of(table.columns[self.label_column]) if has_labels else ()
        return found, files, [str(label).strip() for label in labels], where

    def _place(self, home: Path, name: str) -> Path:
        """Where a file of that name is: beside the table, or in `folder` there."""
        inside = home / self.folder / name
        return inside if inside.exists() else home / name


def of_arrays(
    images: np.ndarray | Stream, mean: Sequence[float], std: Sequence[float], channels: int
) -> ImagePreparation | None:
    """The preparation of a known set of images (n, C, H, W): new ones are scaled to its size, if that is a square; None
    for volumes, and for images that no file holds."""
    if len(images.shape) != 4 or images.shape[1] not in (1, 3):
        return None
    c, height, width = (int(size) for size in images.shape[1:])
    decoding = DecodeOptions(height if height == width else None, c, tuple(mean), tuple(std))
    return ImagePreparation(decoding, (c, height, width), channels)
