"""Data sets in HDF5 files: arrays by name, or a group of arrays for each client, as TensorFlow Federated has them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order, shorten
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.arrays import ArrayOptions
from fedmpi.data.sources.common import as_floats, file_name, find, image_bytes, with_sites
from fedmpi.data.sources.named_arrays import ArrayPreparation, from_arrays
from fedmpi.data.sources.pictures.decode import PixelRange
from fedmpi.data.streaming import StoredArrays, wanted

PARTS = {  # words in the name of a data set or its group -> how we call the arrays of that part
    **dict.fromkeys(("train", "training"), ""),
    **dict.fromkeys(("val", "valid", "validation"), "val_"),
    **dict.fromkeys(("test", "testing"), "test_"),
}
USUAL = {  # what is looked for where the config names nothing
    "x": ("x", "images", "image", "pixels", "inputs", "features", "data"),
    "y": ("y", "labels", "label", "targets", "target"),
    "site": ("site", "sites"),
}
OPTION = {"x": "inputs", "y": "labels", "site": "sites"}
Arrays = dict[str, dict[str, Any]]  # "x", "y", "site", "val_x", ..., "test_site" -> data sets by client
CLIENTS = "examples"  # the group of TensorFlow Federated's files, with a group for each client
SHARED_TEST = "coarse_label"  # TFF's CIFAR-100 has it, whose test clients are others with the names of training clients

Name = Annotated[str, Field(min_length=1)]


def hdf5(
    root: Path,
    *,
    site: str | None = None,
    path: Name | None = None,
    test_path: Name | None = None,
    inputs: Name | None = None,
    labels: Name | None = None,
    sites: Name | None = None,
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    mean: list[float] | None = None,
    std: list[Annotated[float, Field(gt=0)]] | None = None,
    axes: str | None = None,
    pixel_range: PixelRange | None = None,
) -> Dataset:
    """Arrays in the HDF5 file root/path, read by h5py; a silo is a file of its own.

    What is in a group train, val or test, or has such a word in its name (x_train, test_set_y), is of that part.
    A file whose top level, or whose group `examples` (TensorFlow Federated), holds nothing but groups has a client in
    each group: `partition: {scheme: site}`, in ascending order of their names, numbers by size.

    path: the file, relative to data.root; of silos it may hold {site}, which becomes the silo's name.
    test_path: another file, whose arrays are the test part.
    inputs: the name of the samples, without the word for the part: images for train/images. Without it one of x,
    images, image, pixels, inputs, features and data.
    labels: that of the labels; without it one of y, labels, label, targets and target.
    sites: that of the owners of rows, numbers from 0; without it site or sites, if there.
    classes: their number, else the largest label + 1; with targets of several numbers the number of the model's
    outputs.
    test_fraction: without a test part, the share of each class of each site that becomes it, 0.2 if it is left out.
    mean: by channel, subtracted from the samples.
    std: by channel, by which they are divided then.
    axes: of the samples, such as NCHW, NHWC, NDHW, as of npz.
    pixel_range: [low, high], which become 0 and 1; or file, the least and the largest value of each row.
    """
    names = {"x": inputs, "y": labels, "site": sites}
    at = find(root, (file_name("hdf5", site, path),), "hdf5", "correct data.root or data.path")
    arrays, unread = _arrays_in(at, names)
    if test_path is not None:
        test_at = find(root, (file_name("hdf5", site, test_path, "test_path"),), "hdf5", "correct data.test_path")
        tests, others = _arrays_in(test_at, names, "test_")
        twice = {*arrays} & {*tests}
        if twice or len({bool(client) for part in (arrays, tests) for own in part.values() for client in own}) > 1:
            problem = f"both hold {min(twice)}" if twice else "do not both have a group for each client"
            raise UserError(f"{at} and {test_at} {problem}; leave data.test_path out, or correct the files")
        arrays, unread = arrays | tests, [*unread, *others]
    for key, name in names.items():
        if not any(each.endswith(key) for each in arrays) and (name or key != "site"):
            known = f"{name!r} (data.{OPTION[key]})" if name else f"for {key}: {', '.join(USUAL[key])}"
            raise UserError(f"{at} has no data set {known}; others are {shorten(', '.join(unread)) or 'none'}")
    clients = natural_order({client for own in arrays.values() for client in own} - {""})
    ready, uint8 = _joined(arrays, clients, at, on_disk=pixel_range is None)
    options = ArrayOptions(axes, pixel_range, mean, std)
    data = from_arrays(ready, at, options, classes, test_fraction, by_site=True)
    if isinstance(data.preparation, ArrayPreparation):  # of floats in the file that are kept as bytes
        data = replace(data, preparation=replace(data.preparation, uint8=uint8))
    if site is not None or data.site is None or not clients:
        return data
    shared = data.test_site is None or any(name.endswith(SHARED_TEST) for name in unread)
    test_owner = np.zeros(len(data.test_y), np.int64) if data.test_site is None else data.test_site.numpy()
    return with_sites(data, clients, data.site.numpy(), test_owner, shared)


def open_file(path: Path) -> Any:
    """The h5py.File at `path`. HDF5's locks, which many file systems of clusters refuse, are not needed to read."""
    if find_spec("h5py") is None:
        raise UserError(f"{path} is read by h5py, which is not installed; pip install h5py")
    import h5py

    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path} cannot be opened as HDF5: {error}; write it anew with h5py") from error


def _arrays_in(at: Path, names: Mapping[str, str | None], part: str = "") -> tuple[Arrays, list[str]]:
    """Return the data sets of a file by client, under "" where it has no clients, and the paths of all others.

    Args:
        names: for "x", "y" and "site" the name in the config; None: one of the usual names.
        part: "test_" if all data sets of the file are of that part, whatever they are called.
    """
    import h5py

    file = open_file(at)
    top = file.get(CLIENTS, file)
    entries = {name: top.get(name) for name in top}  # None: a link that leads nowhere
    by_client = bool(entries) and all(isinstance(entry, h5py.Group) for entry in entries.values())
    if top is file and any(word in PARTS for name in entries for word in _words(name)):
        by_client = False
    arrays: Arrays = {}
    unread: dict[str, None] = {}
    for client in natural_order(entries) if by_client else [""]:
        for name, array in _data_sets(top[client] if client else top):
            key = _key(name, names, part)
            if key is None:
                unread[name] = None
                continue
            other = arrays.setdefault(key, {}).setdefault(client, array)
            if other is not array:
                both = f"{other.name} and {array.name} could both be {key}"
                raise UserError(f"{at}: {both}; say which in data.{OPTION[key.rpartition('_')[2]]}")
    to_report = [name for name in unread if name != SHARED_TEST]
    if to_report:
        remedy = "data.inputs, data.labels and data.sites name what is read"
        warnings.warn(f"data: {at}: not read: {shorten(', '.join(to_report))}; {remedy}", stacklevel=3)
    return arrays, list(unread)


def _data_sets(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the data sets below a group, each with its path."""
    import h5py

    for name in group:
        entry = group.get(name)
        if isinstance(entry, h5py.Dataset):
            yield f"{above}{name}", entry
        elif isinstance(entry, h5py.Group):
            yield from _data_sets(entry, f"{above}{name}/")


def _words(name: str) -> list[str]:
    return [word.casefold() for word in re.split(r"[^0-9A-Za-z]+", name) if word]


def _without_part(name: str) -> tuple[str | None, str]:
    """The part in a name, and the rest: ("test_", "x") of "test_set_x", "x_test" and "test/x"."""
    words = _words(name)
    part = next((PARTS[word] for word in words if word in PARTS), None)
    dropped = {*PARTS, "set"} if part is not None else set()
    return part, "_".join(word for word in words if word not in dropped)


def _key(name: str, names: Mapping[str, str | None], part: str) -> str | None:
    """Which of our arrays a data set is: "test_x"; None if none."""
    own_part, rest = _without_part(name)
    if part and own_part not in (None, part):
        return None
    for key, option in names.items():
        if rest in (USUAL[key] if option is None else (_without_part(option)[1],)):
            return f"{own_part or part}{key}"
    return None


def _joined(arrays: Arrays, clients: Sequence[str], at: Path, on_disk: bool) -> tuple[dict[str, Any], bool]:
    """Return the arrays of all clients, one after the other, with the number of each row's client; and whether the
    samples are bytes in the file.

    Floats v / 255 of clients' images are kept as bytes. on_disk: images of uint8 may be read when a batch needs them.
    """
    stored = {key: [own[client] for client in clients or [""] if client in own] for key, own in arrays.items()}
    for parts in stored.values():
        other = next((part for part in parts if part.ndim == 0 or part.shape[1:] != parts[0].shape[1:]), None)
        if other is not None:
            shapes = f"{other.name} has the shape {other.shape} and {parts[0].name} {parts[0].shape}"
            raise UserError(f"{at}: {shapes}; rows of one shape are needed")
    inputs = {key: parts for key, parts in stored.items() if key.endswith("x")}
    samples = [part for parts in inputs.values() for part in parts]
    is_images = all(part.ndim in (3, 4, 5) for part in samples)
    is_bytes = is_images and all(part.dtype == np.uint8 for part in samples)
    if is_bytes and on_disk and wanted(sum(part.size for part in samples)):
        joined: dict[str, Any] = {key: StoredArrays(parts) for key, parts in inputs.items()}
    else:
        may_shrink = clients and is_images
        read = {key: [image_bytes(x) if may_shrink else x for x in map(_read, inputs[key])] for key in inputs}
        if may_shrink and any(x.dtype != np.uint8 for parts in read.values() for x in parts):
            read = {key: [as_floats(x) for x in parts] for key, parts in read.items()}
        joined = {key: np.concatenate(parts) for key, parts in read.items()}
    for key, parts in stored.items():
        if key not in inputs:
            array = np.concatenate([_read(part) for part in parts])
            joined[key] = array.reshape(len(array)) if 0 < array.size == len(array) else array
    for key in inputs if clients else ():
        rows = [len(arrays[key].get(name, ())) for name in clients]
        joined[f"{key[:-1]}site"] = np.repeat(np.arange(len(clients)), rows)
    return joined, all(part.dtype == np.uint8 for part in inputs["x"])


def _read(part: Any) -> np.ndarray:
    """All rows, in the byte order of this machine."""
    try:
        array = part.asstr()[()] if part.dtype.kind == "O" else part[()]
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"{part.file.filename}: {part.name} cannot be read: {error}") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)
