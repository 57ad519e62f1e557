"""Files with labels become a data set: read, a test part held out, standardised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources import common
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import DecodeOptions
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


def parted(
    train: Files, test: Files, classes: Sequence[str], options: DecodeOptions, groups: Sequence[str] = ()
) -> Dataset:
    """A data set whose test part is given. classes: their names, in order; groups: of the training files."""
    both = train + test
    images = reading.read(both.paths, options, both.rows)
    y, n = torch.tensor(both.labels), len(train.paths)
    found = _dataset((images[:n], y[:n]), (images[n:], y[n:]), classes, options)
    return replace(found, group=common.numbered(groups))


def check_site(data: Dataset, name: str, at: str, classes: Sequence[str], small: str) -> Dataset:
    """The data of a site; with `refuse`, UserError for one training picture, or pictures of one class alone."""
    seen = data.train_y.unique()
    if small == "keep" or (len(data.train_y) > 1 and len(seen) > 1):
        return data
    many = count(len(data.train_y), "training picture")
    has = f"{many} of one class, {classes[int(seen[0])]!r}" if len(data.train_y) > 1 else many
    raise UserError(f"{at}: site {name!r}, which begins there, has {has}; say data.small_sites: keep, or leave it out")


def held_out(
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
    return replace(found, group=common.numbered([g for g, out in zip(groups, held, strict=False) if not out]))


def _dataset(train: Part, test: Part, classes: Sequence[str], options: DecodeOptions) -> Dataset:
    (x, y), (test_x, test_y) = train, test
    channels, height, width = (int(size) for size in x.shape[1:])
    made = ImagePreparation(options, (channels, height, width), channels, tuple(classes))
    return Dataset(made.normalised(x), y, made.normalised(test_x), test_y, len(classes), preparation=made)
