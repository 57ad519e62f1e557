"""The conversion of image files to inputs of a model, for training data and for new files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize
from fedmpi.data.csv_file import decode_cells
from fedmpi.data.lazy_images import LazyImages, make_lazy_images
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation, check_path, to_paths
from fedmpi.data.sources.images import read_images
from fedmpi.data.sources.images.decode import DecodeOptions, is_image_file
from fedmpi.data.sources.tables.read_table import Table, read_table
from fedmpi.data.streaming import Stream

TABLE_SUFFIXES = (".csv", ".tsv", ".tab", ".parquet")
ACCEPTED_INPUTS = "a picture, a folder of them, a CSV file that names them, or a list of files"


@dataclass(frozen=True)
class ImagePreparation(Preparation):
    """The options for decoding images, and for normalising them when a batch is read.

    Attributes:
        decoding: size, channels and normalisation.
        stored: the shape (C, H, W) of a decoded image.
        channels: the number of channels of the inputs; a single stored channel is repeated.
        class_names: the classes in the order of their numbers.
        image_column, label_column, delimiter: of a CSV file that lists images.
        folder: the folder of the images, relative to that of the CSV file.
    """

    decoding: DecodeOptions
    stored: tuple[int, int, int]
    channels: int
    class_names: tuple[str, ...] = ()
    image_column: str = "path"
    label_column: str = "label"
    delimiter: str = ","
    folder: str = "."

    kind: ClassVar[str] = "images"

    def normalize(self, images: np.ndarray | Stream) -> LazyImages:
        """Wrap decoded images (n, C, H, W), uint8 or float32 in 0..1, to be normalised when they are read."""
        return make_lazy_images(images, self.decoding.mean, self.decoding.std, self.channels)

    def read(self, request: PredictionRequest) -> NewRows:
        ids, files, labels, rows = self._list_files(request)
        images = read_images.decode_images(files, self.decoding, rows)
        if tuple(images.shape[1:]) != self.stored:
            channels, height, width = images.shape[1:]
            c, h, w = self.stored
            raise UserError(
                f"{files[0]}: images of {width}x{height} pixels and {channels} channels; those of the training "
                f"were {w}x{h} with {c}, and without data.size none is scaled"
            )
        x = self.normalize(images)
        if not labels:
            return NewRows(ids, x)
        number = {name: k for k, name in enumerate(self.class_names)}
        known = [label in number for label in labels]
        y = torch.tensor([number.get(label, 0) for label in labels])
        if all(known):
            return NewRows(ids, x, y)
        first = known.index(False)
        reason = f"{rows[first] or files[first]}: {labels[first]!r} is no class of the training"
        if not any(known):
            return NewRows(ids, x, why_no_targets=reason)
        reason = f"{reason}; {pluralize(known.count(False), 'row')} of {len(known)} left out"
        return NewRows(ids, x, y, why_no_targets=reason, has_target=torch.tensor(known))

    def _list_files(self, request: PredictionRequest) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
        """Return columns that identify the images, the files, their labels if known, and the rows that list them."""
        if isinstance(request.rows, Sequence) and not isinstance(request.rows, str):
            files = to_paths(request.rows, ACCEPTED_INPUTS)
            return _identify_files(files, files)
        path = check_path(request, folder=True, takes=ACCEPTED_INPUTS)
        if path.is_file() and path.suffix.lower() in TABLE_SUFFIXES:
            return self._list_files_in_table(read_table(path, self.delimiter), request.ids)
        if request.ids:
            raise UserError(f"{path} has no columns to copy; a CSV file that names pictures has")
        if path.is_file():
            return _identify_files([path], [path.name])
        files = sorted(file for file in path.rglob("*") if is_image_file(file) and file.is_file())
        if not files:
            raise UserError(f"{path} holds no picture")
        names = [file.relative_to(path) for file in files]
        in_class_folders = all(len(name.parts) > 1 and name.parts[0] in self.class_names for name in names)
        return _identify_files(files, names, [name.parts[0] for name in names] if in_class_folders else [])

    def _list_files_in_table(
        self, table: Table, ids: Sequence[str]
    ) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
        names = decode_cells(table.column(self.image_column, "image_column"))
        rows = [table.row_location(row) for row in range(len(table))]
        home, files = table.path.parent, []
        for row, name in zip(rows, map(str.strip, map(str, names)), strict=True):
            if not name:
                raise UserError(f"{row}: column {self.image_column!r} is empty")
            places = [home / self.folder / name.replace("\\", "/"), home / name.replace("\\", "/")]
            file = next((place for place in places if place.exists()), None)
            if file is None:
                where = f"in {home}: names are relative to the folder of {table.path.name}"
                raise UserError(f"{row}: there is no picture {name} {where}, not to the run's data.root")
            files.append(file)
        columns = {table.row_unit: table.row_numbers, "file": names}
        columns |= {name: decode_cells(table.column(name, "--id")) for name in ids}
        labels = decode_cells(table.columns[self.label_column]) if self.label_column in table.columns else ()
        return columns, files, [str(label).strip() for label in labels], rows


def _identify_files(
    files: list[Path], names: Sequence[Any], labels: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
    ids = {"file": np.array([str(name) for name in names], dtype=object)}
    return ids, files, list(labels), [""] * len(files)


def preparation_for_arrays(
    images: np.ndarray | Stream, mean: Sequence[float], std: Sequence[float], channels: int
) -> ImagePreparation | None:
    """Return the preparation for new images of a public set (n, C, H, W), scaled to its size if it is square.

    None for volumes, and for numbers of channels that no image file has.
    """
    if len(images.shape) != 4 or images.shape[1] not in (1, 3):
        return None
    c, height, width = (int(size) for size in images.shape[1:])
    decoding = DecodeOptions(height if height == width else None, c, tuple(mean), tuple(std))
    return ImagePreparation(decoding, (c, height, width), channels)
