"""Any data set as arrays in one .npz file."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.pictures import Pictures, stacked
from fedmpi.data.sources.arrays import KEYS, ArrayOptions, ArrayPreparation, samples, targets_of, with_axes
from fedmpi.data.sources.common import checked_fraction, find, holdout
from fedmpi.data.sources.pictures.decode import PixelRange
from fedmpi.data.streaming import in_archive, wanted

PICTURES = ("x", "val_x", "test_x")
NEEDS = (  # an array, and the one that it cannot be without
    *(("x", "y"), ("y", "x"), ("val_x", "val_y"), ("val_y", "val_x"), ("val_site", "val_x"), ("val_site", "site")),
    *(("test_x", "test_y"), ("test_y", "test_x"), ("test_site", "test_x")),
)
ACCEPTED = "; ".join(" or ".join((key, *others)) for key, others in KEYS.items())


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
    if site is None and not path:
        raise UserError("npz: data.path is missing; it names the .npz file, relative to data.root")
    if site is not None and path and "{site}" not in path:
        raise UserError(f"npz: data.path: {path!r} would be one file for all silos; write {{site}} where they differ")
    file = (path or "{site}").replace("{site}", site or "{site}")
    at = find(root, (file,), "npz", "correct data.root, or data.path (data.silos in silo mode)")
    arrays, files = _read(at, mapped=pixel_range is None)
    options = ArrayOptions(axes, pixel_range, mean, std)
    known = f"known: {ACCEPTED}"
    return from_arrays(arrays, files, at, options, classes, test_fraction, val, known, silo=site is not None)


def from_arrays(
    arrays: dict[str, np.ndarray],
    names: Sequence[str],
    at: Path,
    options: ArrayOptions,
    classes: int | None,
    test_fraction: float | None,
    val: Literal["join", "leave"],
    known: str,
    silo: bool = False,
    by_site: bool = False,
) -> Dataset:
    """The data set of arrays x, y, site, val_x, ..., test_site of the file `at`; see `npz` for the options.

    Args:
        arrays: x, y and what else there is of KEYS, with one row a sample; x may stay on disk.
        names, known: of all arrays in the file, and of those that are understood, for messages.
        by_site: without test_x, test_fraction of each class of each site is the test part; else of each class.
    """
    if val == "leave" and not silo and not any(name.startswith("val_") for name in arrays):
        raise UserError(f"{at} has no val_x, which data.val: leave would leave out; it holds {', '.join(names)}")
    if val == "leave":
        arrays = {name: array for name, array in arrays.items() if not name.startswith("val_")}
    for name, need in NEEDS:
        if need not in arrays and (name in arrays or need in ("x", "y")):
            raise UserError(f"{at} has no array {need!r}; it holds {', '.join(names) or 'none'}; {known}")
    test_fraction = checked_fraction(test_fraction, f"{at} has test_x, which" if "test_x" in arrays else "")
    options = with_axes(options, arrays["x"].shape, "x", at)
    x, y, owner = _part(arrays, "", at, options)
    _alike(arrays, at)
    made = ArrayPreparation(arrays["x"].shape[1:], arrays["x"].dtype == np.uint8, options)
    if "val_x" in arrays:
        x, y, owner = _joined((x, y, owner), _part(arrays, "val_", at, options), at)
    if "test_x" in arrays:
        test_x, test_y, test_owner = _part(arrays, "test_", at, options)
        if (y.dtype, x.shape[1:]) != (test_y.dtype, test_x.shape[1:]):
            raise UserError(
                f"{at}: a row of x is {tuple(x.shape[1:])} with y {arrays['y'].dtype}, one of test_x "
                f"{tuple(test_x.shape[1:])} with test_y {arrays['test_y'].dtype}; they must agree"
            )
    else:
        labels = y.numpy() if y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
        if by_site and owner is not None:
            classes_ = labels if labels.dtype.kind == "i" else np.zeros(len(y), dtype=np.int64)
            labels = np.unique(np.stack([owner.numpy(), classes_]), axis=1, return_inverse=True)[1].reshape(-1)
        train, test = (torch.from_numpy(rows) for rows in holdout(labels, test_fraction))
        test_x, test_y, test_owner = x[test], y[test], None if owner is None else owner[test]
        x, y, owner = x[train], y[train], None if owner is None else owner[train]
    if y.ndim > 1:
        if classes is None:
            several = f"y has the shape {arrays['y'].shape}; targets of several numbers need data.classes"
            raise UserError(f"{at}: {several}, the model's outputs; of one-hot rows store y.argmax(1)")
        return Dataset(x, y, test_x, test_y, classes, site=owner, test_site=test_owner, preparation=made)
    if y.is_floating_point():
        if classes not in (None, 1):
            raise UserError(
                f"{at}: y holds {arrays['y'].dtype} numbers; with data.classes={classes} whole ones are needed"
            )
        return Dataset(x, y, test_x, test_y, 1, site=owner, test_site=test_owner, preparation=made)
    largest = _largest(y, test_y, at)
    classes = classes or largest + 1
    if largest >= classes:
        raise UserError(f"{at}: y holds the label {largest}; with data.classes={classes} 0..{classes - 1} is allowed")
    return Dataset(x, y, test_x, test_y, classes, site=owner, test_site=test_owner, preparation=made)


def _part(arrays: dict[str, np.ndarray], prefix: str, at: Path, options: ArrayOptions) -> Part:
    """x, y, site of the training part (prefix "") or the test part ("test_"), one row a sample."""
    names = [f"{prefix}{name}" for name in ("x", "y", "site") if f"{prefix}{name}" in arrays]
    rows = {name: len(arrays[name]) for name in names}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        said = ", ".join(f"{name} {n}" for name, n in rows.items())
        raise UserError(f"{at}: the arrays must have one row a sample, and at least one; found {said}")
    x = arrays[f"{prefix}x"]
    if x.ndim < 2 or 0 in x.shape:
        raise UserError(f"{at}: {prefix}x has the shape {x.shape}; (n, f) or (n, C, H, W) is needed, without a 0")
    return (
        samples(x, options, f"{prefix}x", at),
        targets_of(arrays[f"{prefix}y"], f"{prefix}y", at),
        _owner(arrays.get(f"{prefix}site"), f"{prefix}site", at),
    )


def _alike(arrays: dict[str, np.ndarray], at: Path) -> None:
    """Bytes are pictures, scaled to 0..1; other numbers stay what they are: not one part so and the other so."""
    kinds = {name: arrays[name].dtype for name in ("x", "val_x", "test_x") if name in arrays}
    if len({kind == np.uint8 for kind in kinds.values()}) > 1:
        said = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise UserError(f"{at}: {said}; uint8 is scaled to 0..1, others are not: store all of them alike")


def _largest(y: Tensor, test_y: Tensor, at: Path) -> int:
    """The largest label; one far beyond the number of samples is no class but a mistake (an id, a price in cents)."""
    largest = int(torch.cat([y, test_y]).max())
    if largest > 10 * (len(y) + len(test_y)) + 1000:
        raise UserError(
            f"{at}: y holds the label {largest}, but there are {len(y) + len(test_y)} samples; number the classes 0, "
            "1, 2, ..., or store the targets of a regression as float32"
        )
    return largest


def _check_unknown(path: Path, unknown: Sequence[str], known: Sequence[str]) -> None:
    """Warn of arrays that are not read; raise ValueError for one whose name is a misspelling of a known one."""
    plain = {_letters(name): name for name in known}
    for name in unknown:
        meant = plain.get(_letters(name))
        if meant is not None:
            raise ValueError(f"it holds {name}, which is not known; {meant} is meant")
    if unknown:
        warnings.warn(f"{path}: not looked at: {', '.join(unknown)}; known are {', '.join(KEYS)}", stacklevel=2)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).rstrip("s")


def _read(path: Path, mapped: bool) -> tuple[dict[str, np.ndarray], list[str]]:
    """The known arrays under our names, and the names of all arrays in the file. mapped: x may stay on disk."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with archive:
            names = {other: key for key, others in KEYS.items() for other in (key, *others)}
            known = [names[key] for key in archive.files if key in names]
            if len(set(known)) < len(known):
                raise ValueError(f"it holds {', '.join(archive.files)}; each once, under one of its names: {ACCEPTED}")
            files = list(archive.files)
            _check_unknown(path, [key for key in files if key not in names], list(names))
            arrays = {names[key]: array for key, array in _arrays(path, archive, names, mapped).items()}
        for key, array in arrays.items():
            if array.dtype.kind not in "biuf" or array.ndim == 0:
                raise ValueError(f"{key} is {array.dtype} of shape {array.shape}, not rows of numbers")
        return arrays, files
    except Exception as error:  # zip, zlib, numpy's header: what a damaged file makes of them is not to be foreseen
        said = str(error)
        if "pickle" in said:  # numpy takes whatever it does not know for one
            objects = zipfile.is_zipfile(path)
            said = "it holds objects, which are never unpickled" if objects else "it is of another kind"
        raise UserError(
            f"{path} is no readable .npz file of plain arrays: {said}; write it anew with numpy.savez"
        ) from error


def _arrays(path: Path, archive: Any, names: dict[str, str], mapped: bool) -> dict[str, np.ndarray]:
    """The arrays with these names; those of pictures stay on disk where they shall and can."""
    pictures = [key for key in archive.files if names.get(key) in PICTURES]
    on_disk = mapped and wanted(sum(archive.zip.getinfo(f"{key}.npy").file_size for key in pictures))
    found = {}
    for key in archive.files:
        if key in names:
            array = in_archive(path, key) if on_disk and key in pictures else None
            found[key] = archive[key] if array is None else array
    return found


Part = tuple[Tensor | Pictures, Tensor, Tensor | None]  # x, y, site


def _joined(part: Part, more: Part, at: Path) -> Part:
    """The training part with the validation part behind it."""
    for name, a, b in zip(("x", "y", "site"), part, more, strict=True):
        if (a is None) != (b is None):
            raise UserError(
                f"{at} has {name} but no val_{name}; say data.val: leave to train without the validation part"
            )
        if a is not None and b is not None and (a.shape[1:], a.dtype) != (b.shape[1:], b.dtype):
            has = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
            raise UserError(f"{at}: {name} and val_{name} do not join: {has}; say data.val: leave to leave it out")
    (x, y, site), (val_x, val_y, val_site) = part, more
    both = None if site is None or val_site is None else torch.cat([site, val_site])
    return stacked([x, val_x]), torch.cat([y, val_y]), both


def _owner(array: np.ndarray | None, name: str, at: Path) -> Tensor | None:
    if array is None:
        return None
    if array.ndim != 1:
        raise UserError(f"{at}: {name} has the shape {array.shape}; (n,) is needed")
    if array.dtype.kind not in "iub" and not (np.isfinite(array).all() and np.array_equal(array, np.floor(array))):
        raise UserError(f"{at}: {name} holds {array.dtype} numbers that are not whole; a site is 0, 1, 2, ...")
    if array.min() < 0 or array.max() >= 1_000_000:
        raise UserError(f"{at}: {name} holds sites {array.min()}..{array.max()}; number them 0, 1, 2, ...")
    return torch.from_numpy(array.astype(np.int64))
