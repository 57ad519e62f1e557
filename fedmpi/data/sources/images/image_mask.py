"""The data source `image_mask`: images with masks, which contain the class of each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.images import read_images
from fedmpi.data.sources.images.decode import DecodeOptions, PixelRange, Size, read_image_shape
from fedmpi.data.sources.images.image_preprocessing import ImagePreparation
from fedmpi.data.sources.labelled_files import (
    LabelledFile,
    MaskValues,
    PairPatterns,
    check_same_size,
    dataset_from_files,
    find_image_mask_pairs,
    list_files_in_table,
)

Name = Annotated[str, Field(min_length=1)]


def image_mask(
    root: Path,
    *,
    site: str | None = None,
    path: str = ".",
    sites: bool = False,
    image_pattern: str = "images/*",
    mask_pattern: str = "masks/*",
    image_column: Name = "image",
    mask_column: Name = "mask",
    site_column: Name | None = None,
    split_column: Name | None = None,
    group_column: Name | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
    classes: Annotated[int, Field(ge=2, le=65536)] | None = None,
    mask_values: Annotated[tuple[int, ...], Field(min_length=2)] | None = None,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.5,),
    pixel_range: PixelRange | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> Dataset:
    """Images and masks: root/path/images/NAME.* and root/path/masks/NAME.*, or files that the CSV file root/path lists.

    The data set is for the task segmentation. A folder may contain train/, val/ (added to the training part) and test/.

    path: a folder or a CSV file, relative to data.root.
    sites: true if each folder in root/path is a site, for `scheme: site`; in silo mode, each silo is such a folder.
    image_pattern: the file pattern of the images in the folder of a site; * stands for the name that an image and its
    mask share.
    mask_pattern: the file pattern of the masks in the folder of a site; * stands for the same name.
    image_column: the column of a CSV file with the images, relative to root.
    mask_column: the column with the masks, relative to root.
    site_column: the column with the site of each row.
    split_column: the column with train, val (added to the training part) or test.
    group_column: the column with groups, such as patients, whose rows are never split between parts.
    delimiter: the character that separates the cells.
    classes: the number of classes if masks contain class numbers, with 0 for the background.
    mask_values: if masks contain other values, the value of each class, such as [0, 255]. A value that is neither
    listed here nor equal to task.ignore raises an error.
    size: images and masks are scaled and centre-cropped to size x size (masks with nearest-neighbour interpolation);
    without it all images must have the same size.
    channels: 3 for colour, 1 for grey.
    mean: subtracted from the pixels, which are in 0..1; one number, or one per channel.
    std: the pixels are divided by it after `mean` has been subtracted; one number, or one per channel.
    pixel_range: [low, high], the values that are mapped to 0 and 1, or `file`, to use the smallest and largest value of
    each file. It is required for images with more than 8 bits per pixel.
    test_fraction: without a test part, the fraction of each site's pairs that is held out as the test part, with the
    same pairs for every seed; default 0.2.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range)
    numbers = MaskValues("image_mask", classes, mask_values)
    patterns = PairPatterns(image_pattern, mask_pattern, (*Image.registered_extensions(), ".npy"))
    columns = {"image_column": image_column, "mask_column": mask_column, "site_column": site_column}
    columns |= {"split_column": split_column, "group_column": group_column}
    if Path(path).suffix.lower() in (".csv", ".tsv", ".txt"):
        samples = list_files_in_table("image_mask", root, path, ".", columns, delimiter, site)
    else:
        extra = next((key for key in ("site_column", "split_column", "group_column") if columns[key]), None)
        if extra:
            raise UserError(
                f"image_mask: data.{extra} is for CSV files, but data.path is a folder; remove data.{extra}"
            )
        samples = find_image_mask_pairs("image_mask", root, path, patterns, sites, site)

    def read(pairs_of_site: Sequence[LabelledFile], train: np.ndarray, test: np.ndarray) -> Dataset:
        images = read_images.decode_images(
            [pair.file for pair in pairs_of_site], decoding, [pair.location for pair in pairs_of_site]
        )
        masks = _read_masks(pairs_of_site, decoding, numbers)
        shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
        preparation = ImagePreparation(decoding, shape, shape[0], image_column=image_column, delimiter=delimiter)
        x, test_x = (preparation.normalize(images[rows]) for rows in (train, test))
        return Dataset(x, masks[train], test_x, masks[test], numbers.num_classes, preparation=preparation)

    return dataset_from_files(
        samples, read, "image_mask", silo=site, test_fraction=test_fraction, split_column=split_column
    )


def _read_masks(pairs: Sequence[LabelledFile], decoding: DecodeOptions, numbers: MaskValues) -> Tensor:
    """Read the masks of images as class numbers, (n, H, W) int64, scaled and cropped like the images.

    Args:
        pairs: the images and their masks.
        decoding: how the images are decoded.
        numbers: converts the values of a mask to class numbers.

    Raises:
        UserError: an image and its mask have different sizes.
    """
    masks: list[Tensor] = []
    for pair in pairs:
        mask = _read_mask(pair)
        _, *shape = read_image_shape(pair.file, replace(decoding, size=None))
        check_same_size(pair, shape, mask.shape)
        masks.append(numbers.to_classes(mask if decoding.size is None else _fit_mask(mask, decoding.size), pair))
    return torch.stack(masks)  # masks have one size, because their images do


def _read_mask(pair: LabelledFile) -> np.ndarray:
    """Read a mask file, and return its values (H, W).

    For an image with a palette, the values are palette indices. If the mask has several channels, all must be
    identical, and one of them is returned.

    Raises:
        UserError: the file cannot be read, or its channels differ.
    """
    try:
        if pair.mask.suffix == ".npy":
            array = np.load(pair.mask, allow_pickle=False)
        else:
            with Image.open(pair.mask) as image:
                array = np.asarray(image)
                array = array[..., :-1] if image.mode in ("LA", "RGBA") else array
    except FileNotFoundError as error:
        raise pair.make_error(f"mask {pair.mask} not found") from error
    except Exception as error:  # a damaged file can raise many errors
        raise pair.make_error(f"{pair.mask} cannot be read as a mask: {error}; correct or remove the file") from error
    if array.ndim == 3 and array.shape[2] in (1, 3) and (array == array[..., :1]).all():
        array = array[..., 0]
    if array.ndim != 2 or array.dtype.kind not in "buif":
        problem = f"{array.dtype} of shape {array.shape}, but a mask must contain one class number per pixel"
        raise pair.make_error(f"{pair.mask} is {problem}; convert its colours to class numbers")
    return array


def _fit_mask(mask: np.ndarray, size: int) -> np.ndarray:
    """Scale and crop a mask (H, W) to size x size; nearest-neighbour interpolation creates no new values."""
    image = Image.fromarray(mask.astype(np.int32))
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.NEAREST))
