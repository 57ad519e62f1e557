"""Convert arrays x, y, site, val_x, ..., test_site to a data set: the source `npz` and what related sources share."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.lazy_images import LazyImages, concatenate_samples
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation, load_arrays
from fedmpi.data.sources.arrays import ArrayOptions, convert_samples, convert_targets
from fedmpi.data.sources.images.decode import PixelRange
from fedmpi.data.sources.source_utils import find_file, resolve_file_name, resolve_test_fraction, split_train_test

ARRAY_NAMES = {  # name of an array -> its names in the files of Keras and MedMNIST
    "x": ("x_train", "train_images"),
    "y": ("y_train", "train_labels"),
    "site": (),
    "val_x": ("x_val", "val_images"),
    "val_y": ("y_val", "val_labels"),
    "val_site": (),
    "test_x": ("x_test", "test_images"),
    "test_y": ("y_test", "test_labels"),
    "test_site": (),
}
CANONICAL_NAMES = {other: key for key, others in ARRAY_NAMES.items() for other in (key, *others)}
PART_PREFIXES = ("", "val_", "test_")  # prefixes of x, y and site
MAX_SITES = 1_000_000


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
) -> Dataset:
    """Arrays x, y and, if present, site, test_x, test_y, test_site of the file root/path; each silo has its own file.

    The arrays may also have the names of Keras (x_train, ...) or MedMNIST (train_images, ...). val_x, val_y and
    val_site (val_images, val_labels), if present, join the training part, as in FedSOL's TissueMNIST (189,106 = 165,466
    + 23,640). `data.validation` then holds out rows of the joint training part. x holds features (n, f), grey images
    (n, H, W), or images and volumes with the axes that `axes` names. uint8 is divided by 255; other numbers are used as
    they are. y is (n,) or (n, 1): integers are classes, other numbers the targets of a regression. Targets (n, ...) of
    several numbers need `classes`, the number of the model's outputs: of labels for multi_label, of classes for
    segmentation, of symbols for next_symbol, 1 for survival.

    path: the file, relative to data.root; for silos it may contain {site}, which is replaced by the name of the silo.
    Without path the name of the silo is the file's name.
    classes: the number of classes, by default the largest label + 1; for targets of several numbers the number of the
    model's outputs.
    test_fraction: the share of each class that is the test part if there is no test_x; default 0.2, and the same rows
    for every seed.
    mean: subtracted from x in both parts, one number per channel.
    std: x is then divided by it, one number per channel.
    axes: the axes of x, such as NCHW, NHWC, NDHW (volumes of one channel) or NDHWC. Without it the axis of the channels
    is the first or the last one of a sample if exactly one of them has 1 or 3 entries; other shapes are errors.
    pixel_range: [low, high]: these values become 0 and 1; or file: the smallest and the largest value of each row.
    """
    name = resolve_file_name("npz", site, path)
    at = find_file(root, (name,), "npz", "correct data.root, or data.path (data.silos in silo mode)")
    try:
        arrays = _load_arrays(at)
    except Exception as error:  # a damaged file can raise many errors, from zip, zlib or numpy's header
        raise UserError(
            f"{at} is no readable .npz file of plain arrays: {error}; write it anew with numpy.savez"
        ) from error
    return dataset_from_arrays(arrays, at, ArrayOptions(axes, pixel_range, mean, std), classes, test_fraction)


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the file that have a known name, under the names of KEYS."""
    with np.load(path, allow_pickle=False) as archive:
        known = [key for key in archive.files if key in CANONICAL_NAMES]
        unknown = [key for key in archive.files if key not in CANONICAL_NAMES]
        if len({CANONICAL_NAMES[key] for key in known}) < len(known):
            raise ValueError(f"it holds {', '.join(known)}; each once, under one of its names")
        if unknown:
            warnings.warn(
                f"{path}: not looked at: {', '.join(unknown)}; known are {', '.join(ARRAY_NAMES)}", stacklevel=3
            )
        return {CANONICAL_NAMES[key]: archive[key] for key in known}


class ArrayPart(NamedTuple):
    """The samples (n, ...) and targets (n, ...) of one part, and the site of each row (n,) if rows have sites."""

    x: Tensor | LazyImages
    y: Tensor
    site: Tensor | None = None


@dataclass(frozen=True)
class ArrayPreparation(Preparation):
    """The conversion of arrays to inputs, for new rows in an .npz file.

    Attributes:
        row: the shape of one sample in the array.
        uint8: whether the training array holds bytes. New arrays must hold bytes if it does, and other numbers if not.
        options: the order of the axes, the scaling and the normalisation.
    """

    row: tuple[int, ...]
    uint8: bool
    options: ArrayOptions
    class_names: tuple[str, ...] = ()

    kind: ClassVar[str] = "arrays"

    def read(self, request: PredictionRequest) -> NewRows:
        stored, where = load_arrays(request, "an .npz file")
        arrays = {CANONICAL_NAMES[name]: array for name, array in stored.items() if name in CANONICAL_NAMES}
        part = "" if "x" in arrays else "test_"
        if f"{part}x" not in arrays:
            raise UserError(f"{where} has no array 'x'; it holds {', '.join(stored) or 'none'}")
        array, y = arrays[f"{part}x"], arrays.get(f"{part}y")
        if (array.dtype == np.uint8) != self.uint8 or array.shape[1:] != self.row or not len(array):
            needed = f"{'uint8' if self.uint8 else 'other'} rows of the shape {self.row} are needed, as in training"
            raise UserError(f"{where}: {part}x is {array.dtype} of the shape {array.shape}; {needed}")
        rows = NewRows({"row": np.arange(len(array))}, convert_samples(array, self.options, f"{part}x", Path(where)))
        if y is None:
            return rows
        if len(y) != len(array):
            return NewRows(rows.ids, rows.x, why_no_targets=f"{where}: {part}y has {len(y)} rows, {part}x {len(array)}")
        return NewRows(rows.ids, rows.x, convert_targets(y, f"{part}y", Path(where)))


def dataset_from_arrays(
    arrays: Mapping[str, Any],
    at: Path,
    options: ArrayOptions,
    classes: int | None,
    test_fraction: float | None,
    by_site: bool = False,
) -> Dataset:
    """Return the data set of the arrays x, y, ... (keys of KEYS) of the file `at`; see `npz`. x may stay on disk."""
    parts = {}
    for prefix in PART_PREFIXES:
        own = {name: arrays[f"{prefix}{name}"] for name in ("x", "y", "site") if f"{prefix}{name}" in arrays}
        missing = next((name for name in ("x", "y") if name not in own and (own or not prefix)), None)
        if missing:
            raise UserError(f"{at} has no array '{prefix}{missing}'; it holds {', '.join(arrays) or 'none'}")
        if own:
            parts[prefix] = _convert_part(own, prefix, at, options)
    if parts[""].y.ndim > 1 and classes is None:
        shape = f"y has the shape {arrays['y'].shape}; targets of several numbers need data.classes"
        raise UserError(f"{at}: {shape}, the model's outputs; of one-hot rows store y.argmax(1)")
    preparation = ArrayPreparation(arrays["x"].shape[1:], arrays["x"].dtype == np.uint8, options)
    return dataset_from_parts(parts, at, classes, test_fraction, preparation, by_site)


def _convert_part(arrays: Mapping[str, Any], prefix: str, at: Path, options: ArrayOptions) -> ArrayPart:
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise UserError(f"{at}: {prefix}{name} is {array.dtype} of shape {array.shape}, not rows of numbers")
    rows = {f"{prefix}{name}": len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        sizes = ", ".join(f"{name} {n}" for name, n in rows.items())
        raise UserError(f"{at}: the arrays must have one row a sample, and at least one; found {sizes}")
    x, site = arrays["x"], arrays.get("site")
    if x.ndim < 2 or 0 in x.shape:
        raise UserError(f"{at}: {prefix}x has the shape {x.shape}; (n, f) or (n, C, H, W) is needed, without a 0")
    if site is not None:
        if site.ndim != 1 or (site != np.floor(site)).any() or site.min() < 0 or site.max() >= MAX_SITES:
            raise UserError(f"{at}: {prefix}site holds {site.dtype} of shape {site.shape}; (n,) 0, 1, 2, ... is needed")
        site = torch.from_numpy(site.astype(np.int64))
    return ArrayPart(
        convert_samples(x, options, f"{prefix}x", at), convert_targets(arrays["y"], f"{prefix}y", at), site
    )


def dataset_from_parts(
    parts: Mapping[str, ArrayPart],
    at: Path,
    classes: int | None,
    test_fraction: float | None,
    preparation: Preparation | None,
    by_site: bool = False,
) -> Dataset:
    """Return the data set of the parts "", "val_" and "test_"; the first two are the training part.

    Args:
        parts: prefix -> samples.
        at: the file or folder of the samples, for messages.
        classes: the number of classes or of the model's outputs; None: the largest label + 1, and 1 for real numbers.
        test_fraction: the share of each class that is the test part if the parts have none.
        preparation: how new rows become inputs.
        by_site: apply the share to each class of each site.
    """
    fraction = resolve_test_fraction(test_fraction, str(at) if "test_" in parts else "")
    for prefix, part in parts.items():
        if prefix and _describe_format(part) != _describe_format(parts[""]):
            formats = (
                f"rows of x, y are {_describe_format(parts[''])}, of {prefix}x, {prefix}y {_describe_format(part)}"
            )
            raise UserError(f"{at}: {formats}; they must agree")
    if len({part.site is None for prefix, part in parts.items() if prefix != "test_"}) > 1:
        raise UserError(f"{at} has site and no val_site, or the reverse; store both, or neither")
    trained = [part for prefix, part in parts.items() if prefix != "test_"]
    x = trained[0].x if len(trained) == 1 else concatenate_samples([part.x for part in trained])
    y = torch.cat([part.y for part in trained])
    owners = [part.site for part in trained if part.site is not None]
    site = torch.cat(owners) if owners else None
    if "test_" in parts:
        test_x, test_y, test_site = parts["test_"]
    else:
        train_rows, test_rows = map(
            torch.from_numpy, split_train_test(_make_strata(y, site if by_site else None), fraction)
        )
        test_x, test_y, test_site = x[test_rows], y[test_rows], None if site is None else site[test_rows]
        x, y, site = x[train_rows], y[train_rows], None if site is None else site[train_rows]
    outputs = classes or _count_classes(y, test_y, at)
    if y.is_floating_point() and y.ndim == 1 and outputs > 1:
        raise UserError(f"{at}: y holds real numbers; with data.classes={classes} whole ones are needed")
    return Dataset(x, y, test_x, test_y, outputs, site=site, test_site=test_site, preparation=preparation)


def _describe_format(part: ArrayPart) -> str:
    """Return shape and type of a row of samples and of targets, which must be the same in all parts."""
    x = part.x.stored if isinstance(part.x, LazyImages) else part.x
    words = [f"{tuple(each.shape[1:])} {str(each.dtype).removeprefix('torch.')}" for each in (x, part.y)]
    return " and ".join(words)


def _make_strata(y: Tensor, site: Tensor | None) -> np.ndarray:
    """Return the number of each row's class, or of its class and site, (n,); real-valued targets are one class."""
    labels = y.numpy() if y.ndim == 1 and not y.is_floating_point() else np.zeros(len(y), dtype=np.int64)
    if site is None:
        return labels
    return np.unique(np.stack([site.numpy(), labels]), axis=1, return_inverse=True)[1].reshape(-1)


def _count_classes(y: Tensor, test_y: Tensor, at: Path) -> int:
    """Return the largest label + 1, or 1 for real numbers; raise UserError if a label looks like an identifier."""
    if y.is_floating_point():
        return 1
    largest, n = int(torch.cat([y, test_y]).max()), len(y) + len(test_y)
    if largest > 10 * n + 1000:
        raise UserError(
            f"{at}: y holds the label {largest}, but there are {n} samples; number the classes 0, 1, 2, ..., or store "
            "the targets of a regression as float32"
        )
    return largest + 1
