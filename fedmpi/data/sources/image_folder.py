"""Pictures in folders named after their class, as torchvision's ImageFolder has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import holdout, pixels

MODES = {1: "L", 3: "RGB"}


def image_folder(
    root: Path,
    *,
    site: str | None = None,
    path: str = ".",
    size: Annotated[int, Field(ge=1, le=4096)] = 32,
    channels: Literal[1, 3] = 3,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.5,),
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
) -> Dataset:
    """Pictures root/path/train/CLASS/* and, if there, test/CLASS/*; a silo is a folder of that form, root/path/SITE.

    Each picture is scaled and cut at its centre to size x size, and held in memory as float32. channels: 1 grey, 3
    colour. mean, std: of pixels in 0..1, one number or one a channel. class_names: the classes in order, else the
    folders' names sorted; silos need it, for a site may lack a class and would number the others differently.
    Without test/, test_fraction of each class is the test part, the same for every seed.
    """
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) not in (1, channels):
            raise UserError(
                f"image_folder: data.{name} has {len(numbers)} numbers; 1 or channels={channels} are needed"
            )
    given = class_names or ()
    odd = [name for k, name in enumerate(given) if name in given[:k] or Path(name).name != name]
    if odd:
        raise UserError(
            f"image_folder: data.class_names holds {odd[0]!r}; each is the name of a folder, and stands once"
        )
    if site is not None and class_names is None:
        raise UserError("image_folder: data.class_names is missing; silos need it, for a site may not have every class")
    folder = root / path / (site or "")
    if not os.path.isdir(folder / "train"):
        raise UserError(
            f"image_folder: there is no folder {folder / 'train'} (data.root = {root}); correct data.root or data.path"
        )
    names = class_names or [entry.name for entry in _folders(folder / "train")]
    shape = (channels, size)
    images, y = _read(folder / "train", names, *shape)
    x = pixels(images, mean, std, channels)
    if os.path.isdir(folder / "test"):
        images, test_y = _read(folder / "test", names, *shape)
        return Dataset(x, y, pixels(images, mean, std, channels), test_y, classes=len(names))
    train, test = (torch.from_numpy(rows) for rows in holdout(y.numpy(), test_fraction))
    return Dataset(x[train], y[train], x[test], y[test], classes=len(names))


def _folders(folder: Path) -> list[Path]:
    """Hidden ones (.ipynb_checkpoints) are nobody's class."""
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; correct its permissions") from error


def _read(folder: Path, names: Sequence[str], channels: int, size: int) -> tuple[np.ndarray, torch.Tensor]:
    """(n, channels, size, size) uint8 and (n,) labels, class by class, files in the order of their names."""
    unknown = [entry.name for entry in _folders(folder) if entry.name not in names]
    if unknown:
        raise UserError(
            f"{folder} holds the class {unknown[0]!r}; the classes are {', '.join(names)} (data.class_names)"
        )
    known = Image.registered_extensions()
    images, labels = [], []
    for label, name in enumerate(names):
        for file in sorted((folder / name).rglob("*")):
            if file.suffix.lower() in known and file.is_file():
                images.append(_picture(file, channels, size))
                labels.append(label)
    if not images:
        raise UserError(
            f"{folder} holds no picture in a folder of its class ({', '.join(names) or 'there is no folder'})"
        )
    return np.stack(images), torch.tensor(labels)


def _picture(file: Path, channels: int, size: int) -> np.ndarray:
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # 16 or 32 bits: PIL would cut them off at 255
                raise ValueError(f"its pixels are of mode {image.mode}, not of 8 bits")
            pixel = np.asarray(ImageOps.fit(image.convert(MODES[channels]), (size, size), Image.Resampling.BILINEAR))
    except Exception as error:  # what a damaged file makes of a decoder is not to be foreseen
        raise UserError(f"{file} cannot be read as a picture: {error}; mend or remove it") from error
    return pixel[None] if channels == 1 else pixel.transpose(2, 0, 1)
