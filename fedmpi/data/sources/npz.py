"""Any data set as arrays in one .npz file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.arrays import ArrayOptions
from fedmpi.data.sources.common import file_name, find
from fedmpi.data.sources.named_arrays import KEYS, OWN_NAMES, from_arrays
from fedmpi.data.sources.pictures.decode import PixelRange


def npz(
    root: Path,
    *,
    site: str | None = None,
    path: str | None = None,
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    mean: list[float] | None = None,
    std: list[Annotated[float, Field(gt=0)]] | None = None,
    axes: str | None = None,
    pixel_range: PixelRange | None = None,
    val: Literal["join", "leave"] = "join",
) -> Dataset:
    """Arrays x, y and, if there, site, test_x, test_y, test_site of the file root/path; a silo is a file of its own.

    Of silos path may hold {site}, which becomes the silo's name; without path the silo's name is the file's.
    The arrays may also have the names of Keras (x_train, ...) or MedMNIST (train_images, ...).
    val: val_x, val_y (val_images, val_labels; val_site), if there, join the training part, as in FedSOL's TissueMNIST
    (189,106 = 165,466 + 23,640), or are left out. `data.validation` takes its rows from what there is then.
    x: (n, f), grey images (n, H, W), images and volumes with axes as `axes` says; uint8 is scaled to 0..1, other
    numbers are taken as they are. axes: of x, such as NCHW, NHWC, NDHW (volumes of one channel), NDHWC; without it 1 or
    3 entries of the first or the last axis are channels, and other shapes are guessed, with a warning. pixel_range:
    [low, high], which become 0 and 1; or file, the least and the largest value of each row.
    y: (n,) or (n, 1); whole numbers are classes (their number: `classes`, else the largest + 1), other numbers are the
    targets of a regression. Targets (n, ...) of several numbers need `classes`, the number of the model's outputs: of
    labels for multi_label, of classes for segmentation, of symbols for next_symbol, 1 for survival.
    Without test_x, test_fraction (0.2) of each class is the test part, the same for every seed.
    mean, std: one number per channel; x becomes (x - mean) / std, both parts alike.
    """
    name = file_name("npz", site, path)
    at = find(root, (name,), "npz", "correct data.root, or data.path (data.silos in silo mode)")
    try:
        arrays = _read(at)
    except Exception as error:  # zip, zlib, numpy's header: what a damaged file makes of them is not to be foreseen
        raise UserError(
            f"{at} is no readable .npz file of plain arrays: {error}; write it anew with numpy.savez"
        ) from error
    return from_arrays(arrays, at, ArrayOptions(axes, pixel_range, mean, std), classes, test_fraction, val)


def _read(path: Path) -> dict[str, np.ndarray]:
    """Read the known arrays under our names."""
    with np.load(path, allow_pickle=False) as archive:
        known = [key for key in archive.files if key in OWN_NAMES]
        unknown = [key for key in archive.files if key not in OWN_NAMES]
        if len({OWN_NAMES[key] for key in known}) < len(known):
            raise ValueError(f"it holds {', '.join(known)}; each once, under one of its names")
        if unknown:
            warnings.warn(f"{path}: not looked at: {', '.join(unknown)}; known are {', '.join(KEYS)}", stacklevel=3)
        return {OWN_NAMES[key]: archive[key] for key in known}
