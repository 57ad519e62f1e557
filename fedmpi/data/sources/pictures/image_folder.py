"""Pictures in folders named after their class, as torchvision's ImageFolder has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import natural_order
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import PARTS, checked_fraction, joined
from fedmpi.data.sources.pictures.decode import DecodeOptions, Pages, PixelRange, Size
from fedmpi.data.sources.pictures.image_dataset import (
    check_class_names,
    class_folders,
    dataset_of_files,
    pictures_by_class,
)


def image_folder(
    root: Path,
    *,
    site: str | None = None,
    path: str = ".",
    sites: bool = False,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.5,),
    pixel_range: PixelRange | None = None,
    pages: Pages = "refuse",
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None,
    val: Literal["join", "leave"] = "join",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> Dataset:
    """Pictures root/path/CLASS/*, or root/path/train/CLASS/* and test/CLASS/*; with sites, root/path/SITE of that form.

    sites: each folder of root/path is a site, for `scheme: site`; a silo is such a folder. class_names: the classes in
    order, else the folders' names in natural order (1, 2, 10); silos need it, for a site may lack a class and would
    number the others differently. val: pictures in val/ beside train/ join the training part, or are left out. Without
    test/, test_fraction (0.2) of each class (of each site) is the test part, the same for every seed.
    size: each picture is scaled and cut at its centre to size x size; without it all must be of one size. channels: 1
    grey, 3 colour. mean, std: of pixels in 0..1, one number or one a channel. pixel_range: [low, high], which become 0
    and 1; or file, the least and the largest value of each file; images of more than 8 bits need it. pages: of files
    with several pages or frames; refused, or the first is read.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range, pages)
    check_class_names("image_folder", class_names, site)
    folder = root / path
    if not os.path.isdir(folder):
        raise MissingDataError(
            f"image_folder: there is no folder {folder} (data.root = {root}); correct data.root or data.path"
        )
    if site is not None and not os.path.isdir(folder / site):
        there = ", ".join(class_folders(folder)) or "no folder"
        raise MissingDataError(f"image_folder: there is no folder {folder / site} (data.silos); {folder} has {there}")
    by_site = sites or site is not None
    homes = [folder / name for name in ([site] if site else class_folders(folder))] if by_site else [folder]
    if not homes:
        raise UserError(f"image_folder: {folder} holds no folder of a site (data.sites)")
    names = class_names or natural_order(name for home in homes for name in class_folders(_training_folder(home)))
    read = [_read(home, names, decoding, val, test_fraction) for home in homes]
    return joined(read, [home.name for home in homes]) if sites and site is None else read[0]


def _read(home: Path, names: Sequence[str], decoding: DecodeOptions, val: str, test_fraction: float | None) -> Dataset:
    """The data of one folder of classes, or of one with train/, test/ and val/."""
    folder = _training_folder(home)
    files = pictures_by_class(folder, names)
    if not any(file.parent.parent == folder for file in files.paths):
        raise UserError(
            f"image_folder: the folders of {folder} hold no picture but in folders of their own, such as "
            f"{files.paths[0]}; are they sites? then data.sites: true"
        )
    part_folders = {PARTS.get(name.lower()): home / name for name in ([] if folder == home else class_folders(home))}
    if val == "join" and "val" in part_folders:
        files += pictures_by_class(part_folders["val"], names)
    test = part_folders.get("test")
    fraction = checked_fraction(test_fraction, str(test or ""))
    return dataset_of_files(files, fraction if test is None else pictures_by_class(test, names), names, decoding)


def _training_folder(home: Path) -> Path:
    """The folder of class folders that are trained on."""
    if os.path.isdir(home / "train"):
        return home / "train"
    part = next((name for name in class_folders(home) if name.lower() in PARTS), None)
    if part is not None:
        raise UserError(
            f"image_folder: {home} has a folder {part}, but no folder {home / 'train'}; correct data.root or "
            "data.path, or name the folder of the training part `train`"
        )
    return home
