"""Find the samples, labels and sites among the data sets of an HDF5 file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order, shorten

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
    for key, wanted in given.items():
        known = USUAL[key] if wanted is None else (_without_part(wanted)[1],)
        if rest in known:
            return f"{said or part or ''}{key}"
    return None


def _report_unread(at: Path, names: list[str]) -> None:
    names = [name for name in dict.fromkeys(names) if name not in ("coarse_label", "snippets")]  # of TFF
    if names:
        said = f"data: {at}: not read: {shorten(', '.join(names))}"
        warnings.warn(f"{said}; data.inputs, data.labels and data.sites name what is read", stacklevel=4)
