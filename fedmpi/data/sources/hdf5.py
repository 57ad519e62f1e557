"""The data source `hdf5`: named arrays, or one group of arrays per client as in TensorFlow Federated."""

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
from fedmpi.common.text import shorten, sort_naturally
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.arrays import ArrayOptions
from fedmpi.data.sources.images.decode import PixelRange
from fedmpi.data.sources.named_arrays import ArrayPreparation, dataset_from_arrays
from fedmpi.data.sources.source_utils import (
    find_file,
    resolve_file_name,
    to_float32,
    to_uint8_if_exact,
    with_clients_as_sites,
)
from fedmpi.data.streaming import Hdf5Arrays, stays_on_disk

PREFIX_BY_WORD = {  # word in the name of a data set or of its group -> prefix of the arrays of that part
    **dict.fromkeys(("train", "training"), ""),
    **dict.fromkeys(("val", "valid", "validation"), "val_"),
    **dict.fromkeys(("test", "testing"), "test_"),
}
DEFAULT_NAMES = {  # names that are searched for if the config does not set them
    "x": ("x", "images", "image", "pixels", "inputs", "features", "data"),
    "y": ("y", "labels", "label", "targets", "target"),
    "site": ("site", "sites"),
}
OPTION_KEYS = {"x": "inputs", "y": "labels", "site": "sites"}
ClientArrays = dict[str, dict[str, Any]]  # "x", "y", "site", "val_x", ..., "test_site" -> data sets by client
CLIENTS_GROUP = "examples"  # group that contains one group per client in files of TensorFlow Federated
# An array of TFF's CIFAR-100, in which training and test clients with the same name are different clients.
SHARED_TEST_ARRAY = "coarse_label"

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
    """Arrays in the HDF5 file root/path; in silo mode, one file per silo. Needs h5py.

    The words train, val or test in the name of an array or of its group assign it to a part (x_train, test_set_y). If
    the top level of the file, or the group `examples` (TensorFlow Federated), contains only groups, each group is a
    client for `partition: {scheme: site}`. Clients are sorted by name; names that are numbers are sorted by value.

    path: the file, relative to data.root; for silos it may contain {site}, which is replaced by the name of the silo.
    test_path: a second file, whose arrays are all test data.
    inputs: the name of the array of samples, without train, val or test (for example images for train/images); by
    default one of x, images, image, pixels, inputs, features and data.
    labels: the name of the array of labels; by default one of y, labels, label, targets and target.
    sites: the name of the array with the site of each row, numbered from 0; by default site or sites, if present.
    classes: the number of classes, by default the largest label + 1; if each target consists of several numbers, this
    option must be set to the number of model outputs.
    test_fraction: without a test part, the fraction of each class at each site that is held out as the test part;
    default 0.2.
    mean: subtracted from the samples, one number per channel.
    std: the samples are divided by it after `mean` has been subtracted, one number per channel.
    axes: the axes of the samples, such as NCHW, NHWC or NDHW, as for the data source npz.
    pixel_range: [low, high], the values that are mapped to 0 and 1, or `file`, to use the smallest and largest value of
    each image or volume.
    """
    names = {"x": inputs, "y": labels, "site": sites}
    file = find_file(root, (resolve_file_name("hdf5", site, path),), "hdf5", "correct data.root or data.path")
    arrays, unread = _find_arrays_by_role(file, names)
    if test_path is not None:
        test_file = find_file(
            root, (resolve_file_name("hdf5", site, test_path, "test_path"),), "hdf5", "correct data.test_path"
        )
        tests, test_unread = _find_arrays_by_role(test_file, names, "test_")
        duplicates = {*arrays} & {*tests}
        if duplicates or len({bool(client) for part in (arrays, tests) for own in part.values() for client in own}) > 1:
            problem = (
                f"both contain {min(duplicates)}"
                if duplicates
                else "have different layouts (only one has a group per client)"
            )
            raise UserError(f"{file} and {test_file} {problem}; remove data.test_path, or correct the files")
        arrays, unread = arrays | tests, [*unread, *test_unread]
    for key, name in names.items():
        if not any(each.endswith(key) for each in arrays) and (name or key != "site"):
            known = (
                f"{name!r} (data.{OPTION_KEYS[key]})"
                if name
                else f"for {key} (known names: {', '.join(DEFAULT_NAMES[key])})"
            )
            raise UserError(
                f"{file} has no data set {known}; its other data sets: {shorten(', '.join(unread)) or 'none'}"
            )
    clients = sort_naturally({client for own in arrays.values() for client in own} - {""})
    all_arrays, uint8 = _concat_clients(arrays, clients, file, on_disk=pixel_range is None)
    options = ArrayOptions(axes, pixel_range, mean, std)
    data = dataset_from_arrays(all_arrays, file, options, classes, test_fraction, by_site=True)
    if isinstance(data.preparation, ArrayPreparation):  # floats may be stored as bytes: record the type in the file
        data = replace(data, preparation=replace(data.preparation, uint8=uint8))
    if site is not None or data.site is None or not clients:
        return data
    shared = data.test_site is None or any(name.endswith(SHARED_TEST_ARRAY) for name in unread)
    test_owner = np.zeros(len(data.test_y), np.int64) if data.test_site is None else data.test_site.numpy()
    return with_clients_as_sites(data, clients, data.site.numpy(), test_owner, shared)


def open_hdf5(path: Path) -> Any:
    """Open an HDF5 file for reading, without locking it, because many cluster file systems do not support locks."""
    if find_spec("h5py") is None:
        raise UserError(f"{path} cannot be read, because h5py is not installed; pip install h5py")
    import h5py

    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path} cannot be opened as HDF5: {error}; save it again with h5py") from error


def _find_arrays_by_role(path: Path, names: Mapping[str, str | None], part: str = "") -> tuple[ClientArrays, list[str]]:
    """Find the HDF5 data sets with samples, targets and sites in a file.

    Args:
        names: for "x", "y" and "site", the name of the data set from the config; None: any of `DEFAULT_NAMES`.
        part: "test_" if all data sets of the file belong to the test part; "": their names contain the part.

    Returns:
        The data sets as a dict of dicts, `arrays[key][client]`, where key is for example "test_x", and client is "" if
        the file has no clients; and the paths of all other data sets.
    """
    import h5py

    file = open_hdf5(path)
    root_group = file.get(CLIENTS_GROUP, file)
    entries = {name: root_group.get(name) for name in root_group}  # None: a broken link
    by_client = bool(entries) and all(isinstance(entry, h5py.Group) for entry in entries.values())
    if root_group is file and any(word in PREFIX_BY_WORD for name in entries for word in _split_words(name)):
        by_client = False
    arrays: ClientArrays = {}
    unread: dict[str, None] = {}
    for client in sort_naturally(entries) if by_client else [""]:
        for name, array in _list_data_sets(root_group[client] if client else root_group):
            key = _find_role(name, names, part)
            if key is None:
                unread[name] = None
                continue
            other = arrays.setdefault(key, {}).setdefault(client, array)
            if other is not array:
                conflict = f"{other.name} and {array.name} could both be {key}"
                raise UserError(f"{path}: {conflict}; set data.{OPTION_KEYS[key.rpartition('_')[2]]} to one of them")
    to_report = [name for name in unread if name != SHARED_TEST_ARRAY]
    if to_report:
        remedy = "set data.inputs, data.labels and data.sites to choose which data sets are read"
        warnings.warn(f"data: {path}: ignored data sets: {shorten(', '.join(to_report))}; {remedy}", stacklevel=3)
    return arrays, list(unread)


def _list_data_sets(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, data set) for each data set in a group and its subgroups; paths begin with `prefix`."""
    import h5py

    for name in group:
        entry = group.get(name)
        if isinstance(entry, h5py.Dataset):
            yield f"{prefix}{name}", entry
        elif isinstance(entry, h5py.Group):
            yield from _list_data_sets(entry, f"{prefix}{name}/")


def _split_words(name: str) -> list[str]:
    """Split a name into its words, in lower case."""
    return [word.casefold() for word in re.split(r"[^0-9A-Za-z]+", name) if word]


def _split_part_word(name: str) -> tuple[str | None, str]:
    """Split off the word train, val or test: "test_set_x" gives ("test_", "x").

    Returns:
        The prefix of the part ("" for train; None if the name contains no such word), and the rest of the name.
    """
    words = _split_words(name)
    part = next((PREFIX_BY_WORD[word] for word in words if word in PREFIX_BY_WORD), None)
    dropped = {*PREFIX_BY_WORD, "set"} if part is not None else set()
    return part, "_".join(word for word in words if word not in dropped)


def _find_role(name: str, names: Mapping[str, str | None], part: str) -> str | None:
    """Return the key, such as "test_x", of the data set with this name; None if the name has no known meaning."""
    own_part, base_name = _split_part_word(name)
    if part and own_part not in (None, part):
        return None
    for key, option in names.items():
        if base_name in (DEFAULT_NAMES[key] if option is None else (_split_part_word(option)[1],)):
            return f"{own_part or part}{key}"
    return None


def _concat_clients(
    arrays: ClientArrays, clients: Sequence[str], file: Path, on_disk: bool
) -> tuple[dict[str, Any], bool]:
    """Concatenate the arrays of all clients, and add the client index of each row.

    Images that are stored as floats v / 255 are converted to bytes.

    Args:
        arrays: the data sets by key and client, from `_find_arrays_by_role`.
        clients: the names of the clients; empty if the file has no clients.
        file: the path of the file, for error messages.
        on_disk: whether uint8 images may stay on disk and be read batch by batch.

    Returns:
        The arrays by key, and whether the samples in the file are uint8.
    """
    by_key = {key: [own[client] for client in clients or [""] if client in own] for key, own in arrays.items()}
    for parts in by_key.values():
        other = next((part for part in parts if part.ndim == 0 or part.shape[1:] != parts[0].shape[1:]), None)
        if other is not None:
            shapes = f"{other.name} has the shape {other.shape}, and {parts[0].name} has {parts[0].shape}"
            raise UserError(f"{file}: {shapes}; all rows must have the same shape")
    inputs = {key: parts for key, parts in by_key.items() if key.endswith("x")}
    samples = [part for parts in inputs.values() for part in parts]
    is_images = all(part.ndim in (3, 4, 5) for part in samples)
    is_bytes = is_images and all(part.dtype == np.uint8 for part in samples)
    if is_bytes and on_disk and stays_on_disk(sum(part.size for part in samples)):
        concatenated: dict[str, Any] = {key: Hdf5Arrays(parts) for key, parts in inputs.items()}
    else:
        may_shrink = clients and is_images
        read = {
            key: [to_uint8_if_exact(x) if may_shrink else x for x in map(_read_data_set, inputs[key])] for key in inputs
        }
        if may_shrink and any(x.dtype != np.uint8 for parts in read.values() for x in parts):
            read = {key: [to_float32(x) for x in parts] for key, parts in read.items()}
        concatenated = {key: np.concatenate(parts) for key, parts in read.items()}
    for key, parts in by_key.items():
        if key not in inputs:
            array = np.concatenate([_read_data_set(part) for part in parts])
            concatenated[key] = array.reshape(len(array)) if 0 < array.size == len(array) else array
    for key in inputs if clients else ():
        rows = [len(arrays[key].get(name, ())) for name in clients]
        concatenated[f"{key[:-1]}site"] = np.repeat(np.arange(len(clients)), rows)
    return concatenated, all(part.dtype == np.uint8 for part in inputs["x"])


def _read_data_set(part: Any) -> np.ndarray:
    """Read all rows of an HDF5 data set, in the byte order of this machine."""
    try:
        array = part.asstr()[()] if part.dtype.kind == "O" else part[()]
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"{part.file.filename}: {part.name} cannot be read: {error}; write the file again") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)
