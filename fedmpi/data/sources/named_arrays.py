"""The data source `npz`, and the conversion of named arrays (x, y, site, val_x, ..., test_site) to a data set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize
from fedmpi.data.dataset import Dataset
from fedmpi.data.lazy_images import LazyImages, concatenate_samples
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation, load_arrays
from fedmpi.data.sources.arrays import ArrayOptions, convert_samples, convert_targets
from fedmpi.data.sources.images.decode import PixelRange
from fedmpi.data.sources.source_utils import find_file, resolve_file_name, resolve_test_fraction, split_train_test

ARRAY_NAMES = {  # name of an array -> its names in files of Keras and MedMNIST
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
    """Arrays x, y and optionally site, test_x, test_y, test_site in the .npz file root/path, or in one file per silo.

    The arrays may also be named as in Keras (x_train, ...) or MedMNIST (train_images, ...). The validation part (val_x,
    val_y and val_site, or val_images and val_labels) is added to the training part, as in FedSOL's TissueMNIST
    (189,106 = 165,466 + 23,640); `data.validation` then draws from both. x contains features (n, f), grey images
    (n, H, W), or images or volumes with the axes `axes`. uint8 is divided by 255; other numbers are used as they are.
    y is (n,) or (n, 1): integers are classes, other numbers are regression targets. If each target consists of several
    numbers, so that y is (n, ...), `classes` must be set to the number of model outputs: the number of labels for
    multi_label, of classes for segmentation, of symbols for next_symbol, and 1 for survival.

    path: the file, relative to data.root; for silos it may contain {site}, which is replaced by the name of the silo.
    Without path, the name of the silo is the file name.
    classes: the number of classes, by default the largest label + 1; if each target consists of several numbers, this
    option must be set to the number of model outputs.
    test_fraction: without test_x, the fraction of each class that is held out as the test part, with the same rows for
    every seed; default 0.2.
    mean: subtracted from x, one number per channel.
    std: x is divided by it after `mean` has been subtracted, one number per channel.
    axes: the axes of x, such as NCHW, NHWC, NDHW (volumes with one channel) or NDHWC. By default the channels are the
    first or the last axis of a sample if exactly one of these has 1 or 3 entries; any other shape raises an error.
    pixel_range: [low, high], the values that are mapped to 0 and 1, or `file`, to use the smallest and largest value of
    each image or volume.
    """
    name = resolve_file_name("npz", site, path)
    file = find_file(root, (name,), "npz", "correct data.root or data.path (in silo mode, data.silos)")
    try:
        arrays = _load_arrays(file)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise many errors, from zip, zlib or numpy's header
        is_object_array = "allow_pickle" in str(error)
        problem = "it contains arrays of Python objects (dtype object)" if is_object_array else str(error)
        remedy = (
            "convert them to a numeric dtype, and save them again with numpy.savez"
            if is_object_array
            else "the file may be damaged: copy it again, or save it again with numpy.savez"
        )
        raise UserError(f"{file} cannot be read as an .npz file of numeric arrays: {problem}; {remedy}") from error
    return dataset_from_arrays(arrays, file, ArrayOptions(axes, pixel_range, mean, std), classes, test_fraction)


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Load the arrays whose names are known; return a dict from the keys of `ARRAY_NAMES` to arrays."""
    with np.load(path, allow_pickle=False) as archive:
        known = [key for key in archive.files if key in CANONICAL_NAMES]
        unknown = [key for key in archive.files if key not in CANONICAL_NAMES]
        for first, second in combinations(known, 2):
            if CANONICAL_NAMES[first] == CANONICAL_NAMES[second]:
                problem = f"{first} and {second}, which are two names for the same array"
                raise UserError(f"{path} contains both {problem}; keep only one of them")
        if unknown:
            warnings.warn(
                f"{path}: ignored arrays: {', '.join(unknown)}; known names: {', '.join(ARRAY_NAMES)}", stacklevel=3
            )
        return {CANONICAL_NAMES[key]: archive[key] for key in known}


class ArrayPart(NamedTuple):
    """One part of a data set: samples (n, ...), targets (n, ...), and optionally the site of each row (n,)."""

    x: Tensor | LazyImages
    y: Tensor
    site: Tensor | None = None


@dataclass(frozen=True)
class ArrayPreparation(Preparation):
    """The conversion of arrays in an .npz file to inputs of a model.

    Attributes:
        row: the shape of one sample in the array.
        uint8: whether the training array is uint8. If so, new arrays must be uint8, too; if not, they must have another
            type.
        options: the order of the axes, the scaling and the normalisation.
        class_names: the names of the classes; () if they have none.
    """

    row: tuple[int, ...]
    uint8: bool
    options: ArrayOptions
    class_names: tuple[str, ...] = ()

    kind: ClassVar[str] = "arrays"

    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        stored, source = load_arrays(request, "an .npz file")
        arrays = {CANONICAL_NAMES[name]: array for name, array in stored.items() if name in CANONICAL_NAMES}
        part = "" if "x" in arrays else "test_"
        if f"{part}x" not in arrays:
            raise UserError(f"{source} has no array 'x'; its arrays: {', '.join(stored) or 'none'}")
        array, y = arrays[f"{part}x"], arrays.get(f"{part}y")
        if (array.dtype == np.uint8) != self.uint8 or array.shape[1:] != self.row or not len(array):
            needed = (
                f"must be {'uint8' if self.uint8 else 'a type other than uint8'} with rows of shape {self.row}, "
                "as in training"
            )
            raise UserError(f"{source}: {part}x is {array.dtype} of shape {array.shape}; {needed}")
        rows = NewRows({"row": np.arange(len(array))}, convert_samples(array, self.options, f"{part}x", Path(source)))
        if y is None:
            return rows
        if len(y) != len(array):
            return NewRows(
                rows.ids, rows.x, why_no_targets=f"{source}: {part}y has {len(y)} rows, but {part}x has {len(array)}"
            )
        return NewRows(rows.ids, rows.x, convert_targets(y, f"{part}y", Path(source)))


def dataset_from_arrays(
    arrays: Mapping[str, Any],
    file: Path,
    options: ArrayOptions,
    classes: int | None,
    test_fraction: float | None,
    by_site: bool = False,
) -> Dataset:
    """Convert the arrays of a file to a data set; see `npz`.

    Args:
        arrays: the arrays by name (x, y, ...; see `ARRAY_NAMES`); x may stay on disk.
        file: the path of the file, for error messages.
        options: the order of the axes, the scaling and the normalisation.
        classes: the number of classes or outputs; None: derived from y.
        test_fraction: the fraction of test samples if there is no test part.
        by_site: whether this fraction is drawn from each class at each site; if false, from each class of the whole
            data set.
    """
    parts = {}
    for prefix in PART_PREFIXES:
        arrays_of_part = {name: arrays[f"{prefix}{name}"] for name in ("x", "y", "site") if f"{prefix}{name}" in arrays}
        missing = next(
            (name for name in ("x", "y") if name not in arrays_of_part and (arrays_of_part or not prefix)), None
        )
        if missing:
            other = next(iter(arrays_of_part), "") if prefix else ""
            remedy = f"; add '{prefix}{missing}', or remove '{prefix}{other}'" if other else ""
            raise UserError(
                f"{file} has no array '{prefix}{missing}'; its arrays: {', '.join(arrays) or 'none'}{remedy}"
            )
        if arrays_of_part:
            parts[prefix] = _convert_part(arrays_of_part, prefix, file, options)
    if parts[""].y.ndim > 1 and classes is None:
        problem = f"y has the shape {arrays['y'].shape}, and data.classes is not set"
        remedy = "set data.classes to the number of the model's outputs, or convert one-hot rows with y.argmax(1)"
        raise UserError(f"{file}: {problem}; {remedy}")
    preparation = ArrayPreparation(arrays["x"].shape[1:], arrays["x"].dtype == np.uint8, options)
    return dataset_from_parts(parts, file, classes, test_fraction, preparation, by_site)


def _convert_part(arrays: Mapping[str, Any], prefix: str, file: Path, options: ArrayOptions) -> ArrayPart:
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            kind = "text" if array.dtype.kind in "US" else "a single value" if array.ndim == 0 else "no numbers"
            remedy = "; encode the labels as 0, 1, 2, ..." if kind == "text" and name == "y" else ""
            raise UserError(
                f"{file}: {prefix}{name} contains {kind} (dtype {array.dtype}, shape {array.shape}); must contain "
                f"numbers, one entry per sample{remedy}"
            )
    rows = {f"{prefix}{name}": len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        sizes = ", ".join(f"{name} has {pluralize(n, 'row')}" for name, n in rows.items())
        raise UserError(f"{file}: {sizes}; the arrays must have one row per sample, and at least one row")
    x, site = arrays["x"], arrays.get("site")
    if x.ndim < 2 or 0 in x.shape:
        raise UserError(
            f"{file}: {prefix}x has the shape {x.shape}; must be (n, f) or (n, C, H, W) for n samples, with no "
            "dimension of size 0"
        )
    if site is not None:
        if site.ndim != 1 or (site != np.floor(site)).any() or site.min() < 0 or site.max() >= MAX_SITES:
            raise UserError(
                f"{file}: {prefix}site is {site.dtype} of shape {site.shape}; must be (n,) with values 0, 1, 2, ..."
            )
        site = torch.from_numpy(site.astype(np.int64))
    return ArrayPart(
        convert_samples(x, options, f"{prefix}x", file), convert_targets(arrays["y"], f"{prefix}y", file), site
    )


def dataset_from_parts(
    parts: Mapping[str, ArrayPart],
    file: Path,
    classes: int | None,
    test_fraction: float | None,
    preparation: Preparation | None,
    by_site: bool = False,
) -> Dataset:
    """Combine the training, validation and test part into a data set; the first two form its training part.

    Args:
        parts: the parts by prefix: "" (training), "val_" and "test_".
        file: the file or folder of the samples, for messages.
        classes: the number of classes or of the model's outputs; None: the largest label + 1, or 1 for real numbers.
        test_fraction: the fraction of each class that is held out as the test part if there is none.
        preparation: the conversion of new rows to inputs.
        by_site: whether this fraction is drawn from each class at each site; if false, from each class of the whole
            data set.
    """
    fraction = resolve_test_fraction(test_fraction, str(file) if "test_" in parts else "")
    for prefix, part in parts.items():
        if prefix and _describe_sample_format(part) != _describe_sample_format(parts[""]):
            formats = (
                f"rows of x and y are {_describe_sample_format(parts[''])}, but those of {prefix}x and {prefix}y are "
                f"{_describe_sample_format(part)}"
            )
            raise UserError(f"{file}: {formats}; store both with the same shape and type")
    if len({part.site is None for prefix, part in parts.items() if prefix != "test_"}) > 1:
        raise UserError(f"{file} has only one of the arrays site and val_site; store both, or neither")
    training_parts = [part for prefix, part in parts.items() if prefix != "test_"]
    x = training_parts[0].x if len(training_parts) == 1 else concatenate_samples([part.x for part in training_parts])
    y = torch.cat([part.y for part in training_parts])
    part_sites = [part.site for part in training_parts if part.site is not None]
    site = torch.cat(part_sites) if part_sites else None
    if "test_" in parts:
        test_x, test_y, test_site = parts["test_"]
    else:
        train_rows, test_rows = map(
            torch.from_numpy, split_train_test(_make_strata(y, site if by_site else None), fraction)
        )
        test_x, test_y, test_site = x[test_rows], y[test_rows], None if site is None else site[test_rows]
        x, y, site = x[train_rows], y[train_rows], None if site is None else site[train_rows]
    outputs = classes or _count_classes(y, test_y, file)
    if y.is_floating_point() and y.ndim == 1 and outputs > 1:
        raise UserError(
            f"{file}: y contains real numbers, but data.classes={classes} needs integers; store y as int64, or remove "
            "data.classes"
        )
    return Dataset(x, y, test_x, test_y, outputs, site=site, test_site=test_site, preparation=preparation)


def _describe_sample_format(part: ArrayPart) -> str:
    """Return as a string the shape and type of a sample and of a target, which must be equal in all parts."""
    x = part.x.stored if isinstance(part.x, LazyImages) else part.x
    formats = [f"{tuple(each.shape[1:])} {str(each.dtype).removeprefix('torch.')}" for each in (x, part.y)]
    return " and ".join(formats)


def _make_strata(y: Tensor, site: Tensor | None) -> np.ndarray:
    """Return the stratum of each row, (n,): its class, or class and site; real numbers count as one class."""
    labels = y.numpy() if y.ndim == 1 and not y.is_floating_point() else np.zeros(len(y), dtype=np.int64)
    if site is None:
        return labels
    return np.unique(np.stack([site.numpy(), labels]), axis=1, return_inverse=True)[1].reshape(-1)


def _count_classes(y: Tensor, test_y: Tensor, file: Path) -> int:
    """Return the largest label + 1, or 1 if labels are real numbers; raise UserError if they look like identifiers."""
    if y.is_floating_point():
        return 1
    largest, n = int(torch.cat([y, test_y]).max()), len(y) + len(test_y)
    if largest > 10 * n + 1000:
        raise UserError(
            f"{file}: y contains the label {largest}, but there are only {n} samples; number the classes 0, 1, 2, ..., "
            "or store the targets of a regression as float32"
        )
    return largest + 1
