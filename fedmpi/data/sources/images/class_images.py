"""The data sources `csv_images` and `image_folder`: images with one class each, in a CSV file or in folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import sort_naturally
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.images import read_images
from fedmpi.data.sources.images.decode import DecodeOptions, PixelRange, Size, is_image_file
from fedmpi.data.sources.images.image_preprocessing import ImagePreparation
from fedmpi.data.sources.labelled_files import (
    LabelledFile,
    ReadSite,
    dataset_from_files,
    find_part_folders,
    find_site_folders,
    list_files_in_table,
    list_subfolders,
)
from fedmpi.data.sources.tables.read_table import MISSING_WORDS

Name = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Std = tuple[Annotated[float, Field(gt=0)], ...]
ClassNames = Annotated[tuple[str, ...], Field(min_length=1)]


def csv_images(
    root: Path,
    *,
    path: Name,
    site: str | None = None,
    folder: Name = ".",
    image_column: Name = "path",
    label_column: Name = "label",
    site_column: Name | None = None,
    split_column: Name | None = None,
    group_column: Name | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    mean: tuple[float, ...] = (0.5,),
    std: Std = (0.5,),
    pixel_range: PixelRange | None = None,
    class_names: ClassNames | None = None,
    test_fraction: Fraction | None = None,
) -> Dataset:
    """Images listed in the CSV file root/path, one per row, with their classes and optionally their sites and parts.

    path: the CSV file, relative to data.root.
    folder: the folder of the images, relative to data.root.
    image_column: the column with the image files, relative to root/folder.
    label_column: the column with the classes.
    site_column: the column with the sites of the images, for `scheme: site` and for silos. A silo opens only the images
    of its own rows.
    split_column: the column with train, val or test; val is added to the training part.
    group_column: the column with groups, such as patients, whose images are never split between the training part, the
    test part and the rows that data.validation holds out.
    delimiter: the character that separates the cells.
    size: images are scaled and centre-cropped to size x size; without it all images must have the same size.
    channels: 3 for colour, 1 for grey.
    mean: subtracted from the pixels, which are in 0..1; one number, or one per channel.
    std: the pixels are divided by it after `mean` has been subtracted; one number, or one per channel.
    pixel_range: [low, high], the values that are mapped to 0 and 1, or `file`, to use the smallest and largest value of
    each file. It is required for images with more than 8 bits per pixel.
    class_names: the classes, ordered by class number; by default the labels in natural order (1, 2, 10). Required
    in silo mode, because a class may be missing in the table of a site.
    test_fraction: without split_column, the fraction of each class at each site that is held out as the test part; the
    same images are held out for every seed; default 0.2.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range)
    _check_class_names_option("csv_images", class_names, site)
    columns = {"image_column": image_column, "label_column": label_column, "site_column": site_column}
    columns |= {"split_column": split_column, "group_column": group_column}
    samples = list_files_in_table("csv_images", root, path, folder, columns, delimiter, site)
    names = list(class_names or sort_naturally(sample.label for sample in samples))
    _check_labels(samples, names, label_column, explicit=class_names is not None)
    read = make_labelled_image_reader(names, decoding, image_column, label_column, delimiter, folder)
    return dataset_from_files(
        samples,
        read,
        "csv_images",
        classes=names,
        silo=site,
        test_fraction=test_fraction,
        split_column=split_column,
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
    std: Std = (0.5,),
    pixel_range: PixelRange | None = None,
    class_names: ClassNames | None = None,
    test_fraction: Fraction | None = None,
) -> Dataset:
    """Images in root/path/CLASS, or in root/path/train/CLASS and root/path/test/CLASS.

    With `sites: true`, each folder root/path/SITE has this structure. Images in val/ next to train/ are added to the
    training part.

    path: the folder, relative to data.root.
    sites: true if each folder in root/path is a site, for `scheme: site`; in silo mode, each silo is such a folder.
    size: images are scaled and centre-cropped to size x size; without it all images must have the same size.
    channels: 3 for colour, 1 for grey.
    mean: subtracted from the pixels, which are in 0..1; one number, or one per channel.
    std: the pixels are divided by it after `mean` has been subtracted; one number, or one per channel.
    pixel_range: [low, high], the values that are mapped to 0 and 1, or `file`, to use the smallest and largest value of
    each file. It is required for images with more than 8 bits per pixel.
    class_names: the classes, ordered by class number; by default the names of the folders in natural order (1, 2,
    10). Required in silo mode, because sites that lack a class would otherwise number the classes differently.
    test_fraction: without test/, the fraction of each class at each site that is held out as the test part; the same
    images are held out for every seed; default 0.2.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range)
    _check_class_names_option("image_folder", class_names, site)
    homes = find_site_folders("image_folder", root, path, sites, site)
    folders = [
        (name, part, folder) for name, folder_of_site in homes.items() for part, folder in _find_parts(folder_of_site)
    ]
    training = [folder for _, part, folder in folders if part in ("", "train")]
    names = list(class_names or sort_naturally(name for folder in training for name in list_subfolders(folder)))
    samples: list[LabelledFile] = []
    for name, part, folder in folders:
        own = list_images_by_class(folder, names, part=part, site=name)
        if folder in training and not any(sample.file.parent.parent == folder for sample in own):
            raise UserError(
                f"image_folder: the folders in {folder} contain images only in subfolders, such as {own[0].file}; if "
                "the folders are sites, set data.sites: true"
            )
        samples += own
    read = make_labelled_image_reader(names, decoding)
    return dataset_from_files(samples, read, "image_folder", classes=names, silo=site, test_fraction=test_fraction)


def _find_parts(folder: Path) -> list[tuple[str, Path]]:
    """Return (part, folder) pairs for the folders train, val and test, train first; [("", folder)] if none exist."""
    parts = sorted(find_part_folders(folder), key=lambda part: part[0] not in ("", "train"))
    if parts[0][0] not in ("", "train"):
        raise UserError(
            f"image_folder: {folder} contains {parts[0][1].name}/, but no train/; correct data.root or data.path, or "
            "rename the folder of the training images to train"
        )
    return parts


def list_images_by_class(
    folder: Path,
    names: Sequence[str],
    subfolder: str = "",
    class_source: str = "data.class_names",
    part: str = "",
    site: str = "",
) -> list[LabelledFile]:
    """Return the images in folder/CLASS/subfolder, class by class in the order of their paths.

    Args:
        folder: the folder with one subfolder per class.
        names: the classes, ordered by class number.
        subfolder: the path of the images inside the folder of their class.
        class_source: the option or file that defines the classes, for messages.
        part: the part (train, val or test) to which the images belong; "" if unknown.
        site: the site to which they belong.

    Raises:
        UserError: a subfolder is not one of the classes, or no class has an image.
    """
    unknown = [name for name in list_subfolders(folder) if name not in names]
    if unknown:
        raise UserError(
            f"{folder}: folder {unknown[0]!r} is not one of the classes {', '.join(names)} ({class_source}); remove "
            "the folder, or correct the classes"
        )
    samples = [
        LabelledFile(file, name, part=part, site=site)
        for name in names
        for file in sorted((folder / name / subfolder).rglob("*"))
        if is_image_file(file) and not file.is_dir()
    ]
    if not samples:
        raise UserError(
            f"{folder} contains no images in class folders ({', '.join(names) or 'there is no folder'}); correct "
            "data.root or data.path, or add images"
        )
    return samples


def make_labelled_image_reader(names: Sequence[str], decoding: DecodeOptions, *columns: str) -> ReadSite:
    """Return a function that reads the labelled images of one site into a data set.

    Args:
        names: the classes, ordered by class number.
        decoding: how images are decoded.
        columns: if a CSV file lists the images, the attributes image_column, label_column, delimiter and folder of
            ImagePreparation.
    """
    number = {name: k for k, name in enumerate(names)}

    def read(samples: Sequence[LabelledFile], train: np.ndarray, test: np.ndarray) -> Dataset:
        images = read_images.decode_images(
            [sample.file for sample in samples], decoding, [sample.location for sample in samples]
        )
        y = torch.tensor([number[sample.label] for sample in samples])
        channels, height, width = (int(size) for size in images.shape[1:])
        preparation = ImagePreparation(decoding, (channels, height, width), channels, tuple(names), *columns)
        x, test_x = (preparation.normalize(images[rows]) for rows in (train, test))
        return Dataset(x, y[train], test_x, y[test], len(names), preparation=preparation)

    return read


def _check_class_names_option(source: str, names: Sequence[str] | None, site: str | None) -> None:
    """Raise UserError if data.class_names contains a name twice, or is not set in silo mode."""
    if names is None and site is not None:
        raise UserError(
            f"{source}: data.silos requires data.class_names, because a single site may not have all classes; set "
            "data.class_names"
        )
    duplicate = next((name for k, name in enumerate(names or ()) if name in (names or ())[:k]), None)
    if duplicate is not None:
        raise UserError(f"{source}: data.class_names contains {duplicate!r} twice; list each name only once")


def _check_labels(samples: Sequence[LabelledFile], names: Sequence[str], label_column: str, explicit: bool) -> None:
    """Raise UserError for a class that is not in `names`, or that looks like a missing value.

    Args:
        samples: the images with their classes.
        label_column: the column with the classes, for messages.
        explicit: whether the config defines the classes; if so, they may look like missing values.
    """
    if len(names) == 1:
        problem = f"column {label_column!r} contains only one class, {names[0]!r}"
        file = samples[0].location.rpartition(", line ")[0] or samples[0].location
        raise UserError(f"{file}: {problem}; add samples of other classes, or list all classes in data.class_names")
    for sample in samples:
        if sample.label not in names:
            allowed = f"is not one of data.class_names ({', '.join(names)}); add it there, or correct the row"
            raise sample.make_error(f"class {sample.label!r} in column {label_column!r} {allowed}")
        if sample.label.casefold() in MISSING_WORDS and not explicit:
            problem = f"column {label_column!r} contains {sample.label!r}, which usually means a missing value"
            raise sample.make_error(
                f"{problem}; correct or remove the row; if it is a class, list all classes in data.class_names"
            )
