"""Convert image files to inputs of a model, for training data and for new files."""

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
ACCEPTED_INPUTS = "an image, a folder of images, a CSV file that lists images, or a list of files"


@dataclass(frozen=True)
class ImagePreparation(Preparation):
    """The conversion of image files to inputs of a model: decoding, and normalisation when a batch is read.

    Attributes:
        decoding: size, channels and normalisation.
        stored: the shape (C, H, W) of a decoded image.
        channels: the number of channels of the inputs; a single stored channel is repeated.
        class_names: the classes, ordered by class number.
        image_column, label_column, delimiter: the format of a CSV file that lists images.
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
        """Convert images (n, C, H, W), uint8 or float32 in 0..1, to LazyImages, which are normalised when read."""
        return make_lazy_images(images, self.decoding.mean, self.decoding.std, self.channels)

    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        """Return the decoded images of a request, with their targets if their classes are known."""
        ids, files, labels, rows = self._list_requested_files(request)
        images = read_images.decode_images(files, self.decoding, rows)
        if tuple(images.shape[1:]) != self.stored:
            channels, height, width = images.shape[1:]
            c, h, w = self.stored
            raise UserError(
                f"{files[0]}: the images have {width}x{height} pixels and {channels} channels, but the training images "
                f"had {w}x{h} pixels and {c} channels; convert them, or train with data.size, so that images are scaled"
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
        reason = f"{rows[first] or files[first]}: {labels[first]!r} is not one of the classes of the training data"
        if not any(known):
            return NewRows(ids, x, why_no_targets=reason)
        reason = f"{reason}; {pluralize(known.count(False), 'row')} of {len(known)} ignored"
        return NewRows(ids, x, y, why_no_targets=reason, has_target=torch.tensor(known))

    def _list_requested_files(
        self, request: PredictionRequest
    ) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
        """List the images of a request.

        Returns:
            Four values: columns that identify the images in the predictions; the image files; their labels, [] if
            unknown; and for each image the location of the table row that lists it, "" if there is no table.
        """
        if isinstance(request.rows, Sequence) and not isinstance(request.rows, str):
            files = to_paths(request.rows, ACCEPTED_INPUTS)
            return _list_files_without_table(files, files)
        path = check_path(request, folder=True, takes=ACCEPTED_INPUTS)
        if path.is_file() and path.suffix.lower() in TABLE_SUFFIXES:
            return self._list_requested_in_table(read_table(path, self.delimiter), request.ids)
        if request.ids:
            raise UserError(
                f"--id: {path} has no columns to copy; remove --id, or use a CSV file that lists the images"
            )
        if path.is_file():
            return _list_files_without_table([path], [path.name])
        files = sorted(file for file in path.rglob("*") if is_image_file(file) and file.is_file())
        if not files:
            raise UserError(f"{path} contains no images; give an image, or a folder of images")
        names = [file.relative_to(path) for file in files]
        in_class_folders = all(len(name.parts) > 1 and name.parts[0] in self.class_names for name in names)
        return _list_files_without_table(files, names, [name.parts[0] for name in names] if in_class_folders else [])

    def _list_requested_in_table(
        self, table: Table, ids: Sequence[str]
    ) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
        """Return the result of `_list_requested_files` for images that a table lists.

        ids: the names of further columns that identify the images in the predictions.
        """
        names = decode_cells(table.column(self.image_column, "image_column"))
        rows = [table.row_location(row) for row in range(len(table))]
        folder, files = table.path.parent, []
        for row, name in zip(rows, map(str.strip, map(str, names)), strict=True):
            if not name:
                raise UserError(
                    f"{row}: the cell in column {self.image_column!r} is empty; enter the image file, or remove the row"
                )
            candidates = [folder / self.folder / name.replace("\\", "/"), folder / name.replace("\\", "/")]
            file = next((path for path in candidates if path.exists()), None)
            if file is None:
                searched = f"not found in {folder}; names are relative to the folder of {table.path.name}"
                raise UserError(f"{row}: image {name} {searched}, not to the run's data.root")
            files.append(file)
        columns = {table.row_unit: table.row_numbers, "file": names}
        columns |= {name: decode_cells(table.column(name, "--id")) for name in ids}
        labels = decode_cells(table.columns[self.label_column]) if self.label_column in table.columns else ()
        return columns, files, [str(label).strip() for label in labels], rows


def _list_files_without_table(
    files: list[Path], names: Sequence[Any], labels: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Path], list[str], list[str]]:
    """Return the result of `_list_requested_files` for files that no table lists."""
    ids = {"file": np.array([str(name) for name in names], dtype=object)}
    return ids, files, list(labels), [""] * len(files)


def preparation_for_arrays(
    images: np.ndarray | Stream, mean: Sequence[float], std: Sequence[float], channels: int
) -> ImagePreparation | None:
    """Return a preparation that converts new images to the format of a public data set.

    The result is None if the samples of the data set are not images.

    Args:
        images: the images of the data set, (n, C, H, W). New images are scaled to their size if it is square.
        mean, std: the values with which pixels in 0..1 are normalised, one number or one per channel.
        channels: the number of channels of the inputs of the model.
    """
    if len(images.shape) != 4 or images.shape[1] not in (1, 3):
        return None
    c, height, width = (int(size) for size in images.shape[1:])
    decoding = DecodeOptions(height if height == width else None, c, tuple(mean), tuple(std))
    return ImagePreparation(decoding, (c, height, width), channels)
