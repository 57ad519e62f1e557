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
from fedmpi.data.sources.arrays import ArrayOptions, ArrayPreparation
from fedmpi.data.sources.by_client import as_floats, image_bytes, with_sites
from fedmpi.data.sources.common import find
from fedmpi.data.sources.npz import from_arrays
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


@dataclass
class Found:
    """The data sets of one file.

    Attributes:
        at: the file.
        clients: the names of the groups that are clients, in ascending order, numbers by size; None if there are none.
        arrays: for "x", "y", "site", "val_x", ..., "test_site" the data sets by client, "" without clients.
        names: the paths of all data sets, those of the first client alone.
    """

    at: Path
    clients: list[str] | None = None
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def open_file(path: Path) -> Any:
    """The h5py.File at `path`. HDF5's locks, which many file systems of clusters refuse, are not needed to read."""
    if find_spec("h5py") is None:
        raise UserError(f"{path} is read by h5py, which is not installed; pip install h5py")
    import h5py

    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(f"{path} cannot be opened as HDF5: {error}; write it anew with h5py") from error


def find_arrays(file: Any, at: Path, given: Mapping[str, str | None], part: str | None = None) -> Found:
    """The data sets of samples, labels and sites, for each part and each client.

    Args:
        given: for "x", "y" and "site" the name in the config; None: one of the usual names.
        part: "" or "test_", if all data sets of the file are of that part, whatever they are called.

    Raises:
        UserError: two data sets could be the same array.
    """
    found = Found(at)
    top = file[CLIENTS] if CLIENTS in file and _is_group(file[CLIENTS]) else file
    groups = [name for name in top if _is_group(top.get(name))]
    named_as_parts = any(word in PARTS for name in groups for word in _words(name))
    by_client = bool(groups) and len(groups) == len(top) and (top is not file or not named_as_parts)
    if by_client:
        found.clients = natural_order(groups)
    unread: list[str] = []
    for client in found.clients or [""]:
        for name, array in _data_sets(top[client] if client else top):
            if client in (found.clients or [""])[:1]:
                found.names.append(name)
            key = _key(name, given, part)
            if key is None:
                unread.append(name)
                continue
            other = found.arrays.setdefault(key, {}).setdefault(client, array)
            if other is not array:
                option = OPTION[key.rpartition("_")[2]]
                where = f"{at}{', ' + client if client else ''}"
                both = f"{other.name} and {array.name} could both be {key}"
                raise UserError(f"{where}: {both}; say which in data.{option}")
    _report_unread(at, unread)
    return found


def _is_group(entry: Any) -> bool:
    import h5py

    return isinstance(entry, h5py.Group)


def _data_sets(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The data sets below a group, each with its path; links that lead nowhere are left out."""
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
    """The part that a name says, and the rest: ("test_", "x") of "test_set_x", "x_test" and "test/x"."""
    words = _words(name)
    part = next((PARTS[word] for word in words if word in PARTS), None)
    dropped = {*PARTS, "set"} if part is not None else set()
    return part, "_".join(word for word in words if word not in dropped)


def _key(name: str, given: Mapping[str, str | None], part: str | None) -> str | None:
    """Which of our arrays a data set is: "test_x"; None if none."""
    said, rest = _without_part(name)
    if part is not None and said not in (None, part):
        return None
    for key, own in given.items():
        known = USUAL[key] if own is None else (_without_part(own)[1],)
        if rest in known:
            return f"{said or part or ''}{key}"
    return None


def _report_unread(at: Path, names: list[str]) -> None:
    names = [name for name in dict.fromkeys(names) if name not in ("coarse_label", "snippets")]  # of TFF
    if names:
        said = f"data: {at}: not read: {shorten(', '.join(names))}"
        warnings.warn(f"{said}; data.inputs, data.labels and data.sites name what is read", stacklevel=4)


Name = Annotated[str, Field(min_length=1)]
KNOWN = "known: " + "; ".join(f"{key}: {', '.join(names)}" for key, names in USUAL.items())
SHARED_TEST = "coarse_label"  # TFF's CIFAR-100 has it, whose test clients are others with the names of training clients


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
    if site is None and not path:
        raise UserError("hdf5: data.path is missing; it names the HDF5 file, relative to data.root")
    for key, name in (("path", path), ("test_path", test_path)):
        if site is not None and name and "{site}" not in name:
            raise UserError(f"hdf5: data.{key}: {name!r} would be one file for all silos; write {{site}}")
    given = {"x": inputs, "y": labels, "site": sites}
    found = []
    for key, name in (("path", path or "{site}"), ("test_path", test_path)):
        if name is not None:
            file = name.replace("{site}", site or "{site}")
            at = find(root, (file,), "hdf5", f"correct data.root, or data.{key}")
            found.append(find_arrays(open_file(at), at, given, "test_" if key == "test_path" else None))
    options = ArrayOptions(axes, pixel_range, mean, std)
    return _dataset(found, given, options, classes, test_fraction, val, silo=site is not None)


def _dataset(
    found: Sequence[Found],
    given: Mapping[str, str | None],
    options: ArrayOptions,
    classes: int | None,
    test_fraction: float | None,
    val: Literal["join", "leave"],
    silo: bool,
) -> Dataset:
    at, names = found[0].at, [name for file in found for name in file.names]
    if "snippets" in names:  # of TFF's Shakespeare
        raise UserError(f"{at} holds texts by author, which data.source: text reads")
    clients, stored = _clients(found), _stored(found)
    for key, name in given.items():
        if name is not None and not any(each.endswith(key) for each in stored):
            raise UserError(f"{at} has no data set {name!r}; it holds {shorten(', '.join(names), 200) or 'none'}")
    inputs = {key: list(parts.values()) for key, parts in stored.items() if key.endswith("x")}
    arrays = _samples(inputs, to_bytes=bool(clients), may_stay_on_disk=options.pixel_range is None)
    arrays |= {key: _rows(list(parts.values())) for key, parts in stored.items() if key not in inputs}
    site_names = clients or _number_words(arrays)
    for key in inputs if clients else ():
        rows = [len(stored[key].get(name, ())) for name in clients]
        arrays[f"{key[:-1]}site"] = np.repeat(np.arange(len(clients)), rows)
    data = from_arrays(arrays, names, at, options, classes, test_fraction, val, KNOWN, silo=silo, by_site=True)
    if clients and arrays["x"].dtype == np.uint8 and isinstance(data.preparation, ArrayPreparation):
        given_bytes = all(part.dtype == np.uint8 for part in inputs["x"])  # else they are floats in the file
        data = replace(data, preparation=replace(data.preparation, uint8=given_bytes))
    if silo or data.site is None or not site_names:
        return data
    shared = data.test_site is None or any(name.endswith(SHARED_TEST) for name in names)
    test_owner = np.zeros(len(data.test_y), np.int64) if data.test_site is None else data.test_site.numpy()
    return with_sites(data, site_names, data.site.numpy(), test_owner, shared)


def _clients(found: Sequence[Found]) -> list[str]:
    """The clients of all files; none if rows have no groups of their clients."""
    if len({file.clients is None for file in found}) > 1:
        raise UserError(f"{found[0].at} and {found[1].at}: only one of them has a group for each client")
    return natural_order([name for file in found for name in file.clients or ()])


def _stored(found: Sequence[Found]) -> dict[str, dict[str, Any]]:
    """The data sets of all files by client: of each client as many samples as labels."""
    stored: dict[str, dict[str, Any]] = {}
    for file in found:
        for key, parts in file.arrays.items():
            if stored.setdefault(key, parts) is not parts:
                raise UserError(f"{found[0].at} and {file.at} both hold {key}; leave data.test_path out, or the arrays")
    for key, parts in stored.items():
        _check(list(parts.values()), words=key.endswith("site"))
    for key, other in [(f"{part}x", f"{part}y") for part in ("", "val_", "test_")]:
        for name, x in stored.get(key, {}).items():
            y = stored.get(other, {}).get(name)
            if y is not None and x.shape[:1] != y.shape[:1]:
                raise UserError(f"{_place(x)} has the shape {x.shape} and {y.name} {y.shape}; as many rows are needed")
        odd = {*stored.get(key, ())} ^ {*stored.get(other, ())}
        if found[0].clients is not None and odd:
            raise UserError(f"{found[0].at}: client {min(odd)!r} has only one of {key} and {other}")
    return stored


def _samples(inputs: Mapping[str, list[Any]], to_bytes: bool, may_stay_on_disk: bool) -> dict[str, Any]:
    """The samples of each part, one client after the other.

    Args:
        to_bytes: images of 256 shades are kept as bytes.
        may_stay_on_disk: images of uint8 are read from the file when a batch needs them, if they are many.
    """
    parts = [part for each in inputs.values() for part in each]
    images = all(part.ndim in (3, 4, 5) for part in parts)
    pixels = images and all(part.dtype == np.uint8 for part in parts)
    if pixels and may_stay_on_disk and wanted(sum(part.size for part in parts)):
        return {key: StoredArrays(each) for key, each in inputs.items()}
    if not (to_bytes and images):
        return {key: _rows(each, flat=False) for key, each in inputs.items()}
    held: dict[str, list[np.ndarray]] = {key: [] for key in inputs}
    for key, each in inputs.items():
        for part in each:
            x = _read(part)
            found = image_bytes(x)
            held[key].append(x if found is None else found)
    whole = all(x.dtype == np.uint8 for each in held.values() for x in each)
    return {key: np.concatenate([x if whole else as_floats(x) for x in each]) for key, each in held.items()}


def _rows(parts: Sequence[Any], flat: bool = True) -> np.ndarray:
    """The rows of all clients, one after the other. flat: (n,) of one number a row, whatever the shape."""
    array = np.concatenate([_read(part) for part in parts])
    return array.reshape(len(array)) if flat and 0 < array.size == len(array) else array


def _check(parts: Sequence[Any], words: bool) -> None:
    """Raise UserError for a data set that is not rows of numbers like the first one. words: those are allowed, too."""
    for part in parts:
        if part.dtype.kind in "OSU" and not words:
            raise UserError(f"{_place(part)} holds texts; numbers are needed, such as 0, 1, 2, ... for classes")
        if part.ndim == 0 or part.dtype.kind not in "biufOSU":
            raise UserError(f"{_place(part)} is {part.dtype} of shape {part.shape}, not rows of numbers")
        if part.shape[1:] != parts[0].shape[1:]:
            first = f"one of {parts[0].name} {parts[0].shape[1:]}"
            raise UserError(f"{_place(part)}: a row has the shape {part.shape[1:]}, {first}; they must agree")


def _read(part: Any) -> np.ndarray:
    """All rows, in the byte order of this machine."""
    try:
        array = part.asstr()[()] if part.dtype.kind == "O" else part[()]
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"{_place(part)} cannot be read: {error}") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _place(part: Any) -> str:
    return f"{part.file.filename}: {part.name}"


def _number_words(arrays: dict[str, Any]) -> list[str]:
    """The names of the sites in ascending order, if the arrays name them by words, which become their numbers."""
    keys = [key for key in ("site", "val_site", "test_site") if key in arrays and arrays[key].dtype.kind in "OSU"]
    if not keys:
        return []
    words = {key: [str(w.decode() if isinstance(w, bytes) else w) for w in arrays[key].reshape(-1)] for key in keys}
    names = natural_order([word for each in words.values() for word in each])
    number = {name: k for k, name in enumerate(names)}
    for key in keys:
        arrays[key] = np.array([number[word] for word in words[key]], dtype=np.int64).reshape(arrays[key].shape)
    return names
