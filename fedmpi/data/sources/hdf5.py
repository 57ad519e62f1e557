"""Data sets in HDF5 files: arrays by name, or a group of arrays for each client, as TensorFlow Federated has them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order, shorten
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.arrays import ArrayOptions
from fedmpi.data.sources.by_client import as_floats, image_bytes, with_sites
from fedmpi.data.sources.common import file_name, find
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
CLIENTS = "examples"  # the group of TensorFlow Federated's files, with a group for each client
TEXTS = "snippets"  # TFF's Shakespeare
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
    val: Literal["join", "leave"] = "join",
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
    sites: that of the owners of rows, numbers or words; without it site or sites, if there.
    classes: their number, else the largest label + 1; with targets of several numbers the number of the model's
    outputs.
    test_fraction: without a test part, the share of each class of each site that becomes it, 0.2 if it is left out.
    mean: by channel, subtracted from the samples.
    std: by channel, by which they are divided then.
    axes: of the samples, such as NCHW, NHWC, NDHW, as of npz.
    pixel_range: [low, high], which become 0 and 1; or file, the least and the largest value of each row.
    val: the validation part joins the training part, or is left out.
    """
    names = {"x": inputs, "y": labels, "site": sites}
    at = find(root, (file_name("hdf5", site, path),), "hdf5", "correct data.root or data.path")
    data_sets = find_arrays(open_file(at), at, names)
    if test_path is not None:
        test_at = find(root, (file_name("hdf5", site, test_path, "test_path"),), "hdf5", "correct data.test_path")
        data_sets = data_sets.joined(find_arrays(open_file(test_at), test_at, names, "test_"))
    if TEXTS in data_sets.unread:
        raise UserError(f"{at} holds texts by author, which data.source: text reads")
    for key, name in names.items():
        if not any(each.endswith(key) for each in data_sets.arrays) and (name or key != "site"):
            known = f"{name!r} (data.{OPTION[key]})" if name else f"for {key}: {', '.join(USUAL[key])}"
            raise UserError(
                f"{at} has no data set {known}; others are {shorten(', '.join(data_sets.unread)) or 'none'}"
            )
    options = ArrayOptions(axes, pixel_range, mean, std)
    return _dataset(data_sets, options, classes, test_fraction, val, silo=site is not None)


@dataclass
class DataSets:
    """The data sets of one file.

    Attributes:
        at: the file.
        clients: the names of the groups that are clients, in ascending order, numbers by size; none: ().
        arrays: for "x", "y", "site", "val_x", ..., "test_site" the data sets by client, "" without clients.
        unread: the paths of all other data sets.
    """

    at: Path
    clients: list[str] = field(default_factory=list)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def joined(self, test: DataSets) -> DataSets:
        """The data sets of both files."""
        twice = {*self.arrays} & {*test.arrays}
        if twice or bool(self.clients) != bool(test.clients):
            problem = f"both hold {min(twice)}" if twice else "do not both have a group for each client"
            raise UserError(f"{self.at} and {test.at} {problem}; leave data.test_path out, or correct the files")
        clients = natural_order([*self.clients, *test.clients])
        return DataSets(self.at, clients, self.arrays | test.arrays, [*self.unread, *test.unread])


def open_file(path: Path) -> Any:
    """The h5py.File at `path`. HDF5's locks, which many file systems of clusters refuse, are not needed to read."""
    if find_spec("h5py") is None:
        raise UserError(f"{path} is read by h5py, which is not installed; pip install h5py")
    import h5py

    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path} cannot be opened as HDF5: {error}; write it anew with h5py") from error


def find_arrays(file: Any, at: Path, names: Mapping[str, str | None], part: str | None = None) -> DataSets:
    """Return the data sets of samples, labels and sites, for each part and each client.

    Args:
        names: for "x", "y" and "site" the name in the config; None: one of the usual names.
        part: "test_" if all data sets of the file are of that part, whatever they are called.

    Raises:
        UserError: two data sets could be the same array.
    """
    import h5py

    top = file.get(CLIENTS, file)
    entries = {name: top.get(name) for name in top}  # None: a link that leads nowhere
    named_as_parts = any(word in PARTS for name in entries for word in _words(name))
    by_client = all(isinstance(entry, h5py.Group) for entry in entries.values())
    data_sets = DataSets(at)
    if entries and by_client and (top is not file or not named_as_parts):
        data_sets.clients = natural_order(entries)
    unread: dict[str, None] = {}
    for client in data_sets.clients or [""]:
        for name, array in _data_sets(top[client] if client else top):
            key = _key(name, names, part)
            if key is None:
                unread[name] = None
                continue
            other = data_sets.arrays.setdefault(key, {}).setdefault(client, array)
            if other is not array:
                both = f"{other.name} and {array.name} could both be {key}"
                raise UserError(f"{at}: {both}; say which in data.{OPTION[key.rpartition('_')[2]]}")
    data_sets.unread = list(unread)
    to_report = [name for name in unread if name not in (SHARED_TEST, TEXTS)]
    if to_report:
        remedy = "data.inputs, data.labels and data.sites name what is read"
        warnings.warn(f"data: {at}: not read: {shorten(', '.join(to_report))}; {remedy}", stacklevel=3)
    return data_sets


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


def _key(name: str, names: Mapping[str, str | None], part: str | None) -> str | None:
    """Which of our arrays a data set is: "test_x"; None if none."""
    own_part, rest = _without_part(name)
    if part is not None and own_part not in (None, part):
        return None
    for key, option in names.items():
        if rest in (USUAL[key] if option is None else (_without_part(option)[1],)):
            return f"{own_part or part or ''}{key}"
    return None


def _dataset(
    data_sets: DataSets,
    options: ArrayOptions,
    classes: int | None,
    test_fraction: float | None,
    val: Literal["join", "leave"],
    silo: bool,
) -> Dataset:
    clients, stored = data_sets.clients, {key: list(parts.values()) for key, parts in data_sets.arrays.items()}
    for parts in stored.values():
        other = next((part for part in parts if part.ndim == 0 or part.shape[1:] != parts[0].shape[1:]), None)
        if other is not None:
            shapes = f"{other.name} has the shape {other.shape} and {parts[0].name} {parts[0].shape}"
            raise UserError(f"{data_sets.at}: {shapes}; rows of one shape are needed")
    inputs = {key: parts for key, parts in stored.items() if key.endswith("x")}
    arrays = _samples(inputs, bool(clients), may_stay_on_disk=options.pixel_range is None)
    arrays |= {key: _rows(parts) for key, parts in stored.items() if key not in inputs}
    site_names = clients or _number_words(arrays)
    for key in inputs if clients else ():
        rows = [len(data_sets.arrays[key].get(name, ())) for name in clients]
        arrays[f"{key[:-1]}site"] = np.repeat(np.arange(len(clients)), rows)
    data = from_arrays(arrays, data_sets.at, options, classes, test_fraction, val, by_site=True)
    if isinstance(data.preparation, ArrayPreparation):  # of floats in the file that are kept as bytes
        is_uint8 = all(part.dtype == np.uint8 for part in inputs["x"])
        data = replace(data, preparation=replace(data.preparation, uint8=is_uint8))
    if silo or data.site is None or not site_names:
        return data
    shared = data.test_site is None or any(name.endswith(SHARED_TEST) for name in data_sets.unread)
    test_owner = np.zeros(len(data.test_y), np.int64) if data.test_site is None else data.test_site.numpy()
    return with_sites(data, site_names, data.site.numpy(), test_owner, shared)


def _samples(inputs: Mapping[str, list[Any]], by_client: bool, may_stay_on_disk: bool) -> dict[str, Any]:
    """Return the samples of each part, one client after the other. Images of clients are kept as bytes if they can be.

    may_stay_on_disk: images of uint8 are read from the file when a batch needs them, if they are many.
    """
    parts = [part for each in inputs.values() for part in each]
    is_images = all(part.ndim in (3, 4, 5) for part in parts)
    is_bytes = is_images and all(part.dtype == np.uint8 for part in parts)
    if is_bytes and may_stay_on_disk and wanted(sum(part.size for part in parts)):
        return {key: StoredArrays(each) for key, each in inputs.items()}
    if not (by_client and is_images):
        return {key: np.concatenate([_read(part) for part in each]) for key, each in inputs.items()}
    arrays = {key: [_as_bytes(_read(part)) for part in each] for key, each in inputs.items()}
    if any(x.dtype != np.uint8 for each in arrays.values() for x in each):
        arrays = {key: [as_floats(x) for x in each] for key, each in arrays.items()}
    return {key: np.concatenate(each) for key, each in arrays.items()}


def _as_bytes(x: np.ndarray) -> np.ndarray:
    stored = image_bytes(x)
    return x if stored is None else stored


def _rows(parts: Sequence[Any]) -> np.ndarray:
    """The rows of all clients, one after the other; (n,) of one number a row, whatever the shape."""
    array = np.concatenate([_read(part) for part in parts])
    return array.reshape(len(array)) if 0 < array.size == len(array) else array


def _read(part: Any) -> np.ndarray:
    """All rows, in the byte order of this machine."""
    try:
        array = part.asstr()[()] if part.dtype.kind == "O" else part[()]
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"{part.file.filename}: {part.name} cannot be read: {error}") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _number_words(arrays: dict[str, Any]) -> list[str]:
    """Number the sites in ascending order of their names, if the arrays hold words; return the names."""
    keys = [key for key, array in arrays.items() if key.endswith("site") and array.dtype.kind in "OSU"]
    words = {key: [w.decode() if isinstance(w, bytes) else str(w) for w in arrays[key].reshape(-1)] for key in keys}
    names = natural_order([word for each in words.values() for word in each])
    number = {name: k for k, name in enumerate(names)}
    for key in keys:
        arrays[key] = np.array([number[word] for word in words[key]], dtype=np.int64)
    return names
