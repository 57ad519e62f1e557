"""Pictures in folders named after their class, as torchvision's ImageFolder has them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import natural_order
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import PARTS, checked_fraction, joined
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import Axes, DecodeOptions, Pages, PixelRange, Size, is_picture
from fedmpi.data.sources.pictures.image_dataset import (
    Files,
    check_site,
    class_folders,
    dataset_of_parts,
    dataset_with_test_part,
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
    background: str = "white",
    axes: Axes | None = None,
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None,
    val: Literal["join", "leave"] = "join",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    small_sites: Literal["refuse", "keep"] = "refuse",
) -> Dataset:
    """Pictures root/path/CLASS/*, or root/path/train/CLASS/* and test/CLASS/*; with sites, root/path/SITE of that form.

    sites: each folder of root/path is a site, for `scheme: site`; a silo is such a folder. class_names: the classes in
    order, else the folders' names in natural order (1, 2, 10); silos need it, for a site may lack a class and would
    number the others differently. val: pictures in val/ beside train/ join the training part, or are left out. Without
    test/, test_fraction (0.2) of each class (of each site) is the test part, the same for every seed.
    size: each picture is scaled and cut at its centre to size x size; without it all must be of one size. channels: 1
    grey, 3 colour. mean, std: of pixels in 0..1, one number or one a channel. pixel_range: [low, high], which become 0
    and 1; or file, the least and the largest value of each file; images of more than 8 bits need it. pages: of files
    with several pages or frames; refuse; first; or channels, all of them, one page after the other. background: the
    colour over which transparent pixels are blended (white, black, #204060). axes: HWC or CHW, of .npy files whose
    shape allows both.
    small_sites: with one training picture, or one class; refused or kept.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range, pages, background, axes)
    given = class_names or ()
    odd = [name for k, name in enumerate(given) if name in given[:k] or Path(name).name != name]
    if odd:
        raise UserError(
            f"image_folder: data.class_names holds {odd[0]!r}; each is the name of a folder, and stands once"
        )
    if site is not None and class_names is None:
        raise UserError("image_folder: data.class_names is missing; silos need it, for a site may not have every class")
    folder = root / path
    if not os.path.isdir(folder):
        raise MissingDataError(
            f"image_folder: there is no folder {folder} (data.root = {root}); correct data.root or data.path"
        )
    if site is not None and not os.path.isdir(folder / site):
        there = ", ".join(class_folders(folder)) or "no folder"
        raise MissingDataError(f"image_folder: there is no folder {folder / site} (data.silos); {folder} has {there}")
    homes = [folder / site] if site else [folder / name for name in class_folders(folder)] if sites else [folder]
    part = next((home.name for home in homes if sites and home.name.lower() in PARTS), None)
    if part is not None:
        raise UserError(
            f"image_folder: {folder / part} is a part, not a site; leave data.sites out, or correct data.path"
        )
    if not homes:
        raise UserError(f"image_folder: {folder} holds no folder of a site (data.sites)")
    names = class_names or natural_order(name for home in homes for name in class_folders(_training(home, root)))
    parts = [_files(home, names, val, root) for home in homes]
    reading.warn_of_depths([path for train, test, _ in parts for path in (*train.paths, *test.paths)], decoding)
    with reading.warned_of_once():
        found = [_dataset(*its, names, decoding, test_fraction) for its in parts]
    if sites or site is not None:
        found = [check_site(d, home.name, str(home), names, small_sites) for d, home in zip(found, homes, strict=True)]
    return joined(found, [home.name for home in homes]) if sites and site is None else found[0]


def _files(home: Path, names: Sequence[str], val: str, root: Path) -> tuple[Files, Files, str]:
    """Those of the training part, of the test part, and the folder of the latter; "" where there is none."""
    folder = _training(home, root)
    train = pictures_by_class(folder, names)
    if not any(file.parent.parent == folder for file in train.paths):
        raise UserError(
            f"image_folder: the folders of {folder} hold no picture but in folders of their own, such as "
            f"{train.paths[0]}; are they sites? then data.sites: true"
        )
    beside = [] if folder == home else class_folders(home)
    if val == "join":
        for name in [name for name in beside if PARTS.get(name.lower()) == "val"]:
            train += pictures_by_class(home / name, names)
    test = next((name for name in beside if PARTS.get(name.lower()) == "test"), None)
    for name in beside:
        if name.lower() not in PARTS and any(is_picture(file) for file in (home / name).rglob("*")):
            warnings.warn(f"data: {home / name} is not read; parts are named {', '.join(PARTS)}", stacklevel=2)
    if test is None:
        return train, Files([], []), ""
    return train, pictures_by_class(home / test, names), f"{home / test}"


def _dataset(
    train: Files, test: Files, folder: str, names: Sequence[str], decoding: DecodeOptions, test_fraction: float | None
) -> Dataset:
    fraction = checked_fraction(test_fraction, folder)
    return (
        dataset_of_parts(train, test, names, decoding)
        if folder
        else dataset_with_test_part(train, fraction, names, decoding)
    )


def _training(home: Path, root: Path) -> Path:
    """The folder of class folders that are trained on."""
    if os.path.isdir(home / "train"):
        return home / "train"
    part = next((name for name in class_folders(home) if name.lower() in PARTS), None)
    if part is not None:
        raise UserError(
            f"image_folder: {home} has a folder {part}, but no folder {home / 'train'} (data.root = {root}); correct "
            "data.root or data.path, or name the folder of the training part `train`"
        )
    return home
