"""Helpers that several data sources share: find files, split off a test part, concatenate sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.lazy_images import concatenate_samples
from fedmpi.data.preprocessing import find_common_preparation

PART_BY_WORD = {  # words for the parts of a data set, in columns and as names of folders and splits
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_ignored_target: ContextVar[float | str | None] = ContextVar("ignored", default=None)


@contextmanager
def set_ignored_target(target: float | str | None) -> Iterator[None]:
    """Make `task.ignore` available to data sources within this context; see `get_ignored_target`.

    target: the value of `task.ignore`: a number, "nan", or None.
    """
    token = _ignored_target.set(target)
    try:
        yield
    finally:
        _ignored_target.reset(token)


def get_ignored_target() -> float | str | None:
    """Return `task.ignore`, the target that losses and metrics ignore: a number, "nan", or None."""
    return _ignored_target.get()


def missing_targets_allowed() -> bool:
    """Return whether targets may be missing: if `task.ignore` is "nan", missing targets are stored as NaN."""
    return get_ignored_target() == "nan"


def find_file(root: Path, candidates: Sequence[str], source: str, remedy: str) -> Path:
    """Return the first candidate that is a regular file.

    Raise MissingDataError, with the remedy, if none exists; raise UserError if one exists but is not a regular file.
    `source` is the name of the data source, for messages.
    """
    paths = [root / candidate for candidate in candidates]
    for path in paths:
        if os.path.isfile(path):
            return path
    for path in paths:
        if os.path.lexists(path):
            kind = "a directory" if os.path.isdir(path) else "a broken link, pipe or device"
            raise UserError(f"{source}: {path} is {kind}, not a file (data.root = {root}); {remedy}")
    raise MissingDataError(f"{source}: file {' or '.join(map(str, paths))} not found (data.root = {root}); {remedy}")


def resolve_file_name(source: str, site: str | None, path: str | None, key: str = "path") -> str:
    """Return the name of the file to read, relative to `data.root`.

    In silo mode {site} in `path` is replaced by the name of the silo; without `path`, the silo's name is the file name.

    Args:
        source: the name of the data source, for messages.
        site: the name of the silo; None if there are no silos.
        path: the value of the option `key`.
        key: the name of the option, for messages.
    """
    if site is None and not path:
        raise UserError(f"{source}: data.{key} is not set; set it to the name of the file, relative to data.root")
    if site is not None and path and "{site}" not in path:
        raise UserError(
            f"{source}: data.{key}: {path!r} is the same file for all silos; write {{site}} in place of the silo's "
            f"name, such as {{site}}/{os.path.basename(path)}"
        )
    return (path or "{site}").replace("{site}", site or "{site}")


def check_finite(x: Tensor, name: str, location: Path | str, nan: bool = False) -> Tensor:
    """Return x (n, ...) if all numbers are finite; otherwise raise UserError, naming the first invalid row.

    Args:
        name: the name of the array, for the message.
        location: the file of the array, for the message.
        nan: whether NaN is allowed.
    """
    is_good = ~torch.isinf(x) if nan else torch.isfinite(x)
    if not bool(is_good.all()):
        row = int((~is_good.flatten(1).all(1) if x.ndim > 1 else ~is_good).nonzero()[0, 0])
        value = x[row][~is_good[row]].flatten()[0].item()
        limit = "" if value != value else " (at most 3.4e38 in magnitude)"
        raise UserError(
            f"{location}: {name} contains {value} in row {row}; values must be finite float32 numbers{limit}; correct "
            "the value or drop the row"
        )
    return x


def resolve_test_fraction(fraction: float | None, defined_by: str = "") -> float:
    """Return the fraction of test samples: `data.test_fraction`, by default 0.2.

    Args:
        fraction: `data.test_fraction`; None if it is not set.
        defined_by: what defines the test part, such as a file or a column; "" if nothing does.

    Raises:
        UserError: `data.test_fraction` is set although `defined_by` already defines the test part.
    """
    if defined_by and fraction is not None:
        raise UserError(
            f"data.test_fraction: {fraction:g} has no effect, because {defined_by} already defines the test set; "
            "remove data.test_fraction"
        )
    return 0.2 if fraction is None else fraction


def split_train_test(
    labels: np.ndarray, fraction: float, groups: Sequence[str] | np.ndarray = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a stratified test part, and return the sorted indices of the training and of the test rows.

    Of the n_c samples of each class, round(fraction * n_c) are drawn, but at least one remains for training. The test
    part is the same for every seed of the experiment, because it belongs to the data.

    Args:
        labels: (n,) class numbers. Real-valued targets (regression) count as one class.
        fraction: the fraction of test samples.
        groups: (n,) the group of each sample, such as its patient. If given, entire groups are drawn; the class of a
            group is that of its first sample.
    """
    if len(groups):
        _, first, member = np.unique(groups, return_index=True, return_inverse=True)
        test_part = np.isin(member, split_train_test(labels[first], fraction)[1])
        return np.flatnonzero(~test_part), np.flatnonzero(test_part)
    rng = seeds.numpy_generator(0, "holdout")
    classes = labels if labels.dtype.kind in "iu" else np.zeros(len(labels), dtype=np.int64)
    test = []
    for one in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == one))
        test.append(rows[: min(round(fraction * len(rows)), len(rows) - 1)])
    test_rows = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), test_rows), test_rows


def check_groups_not_split(
    groups: Sequence[str] | np.ndarray, train: Sequence[bool] | np.ndarray, locate: Callable[[int], str]
) -> None:
    """Raise UserError if a group has both training and test rows.

    Args:
        groups: the group of each row, (n,).
        train: whether each row is a training row, (n,).
        locate: returns the file and line of a row, for the message.
    """
    seen = {group: k for k, (group, trained) in enumerate(zip(groups, train, strict=False)) if trained}
    for k, (group, trained) in enumerate(zip(groups, train, strict=False)):
        if group in seen and not trained:
            parts = f"this one is in the test set, and {locate(seen[group])} is in the training set"
            problem = f"rows of group {group!r} (data.group_column) must be in the same set, but {parts}"
            raise UserError(f"{locate(k)}: {problem}; correct the split column, or remove data.group_column")


def encode_groups(groups: Sequence[str] | np.ndarray) -> Tensor | None:
    """Return the index of each row's group for `Dataset.group`, (n,) int64; None without groups."""
    return torch.from_numpy(np.unique(groups, return_inverse=True)[1]) if len(groups) else None


def select_sites(source: str, names: Sequence[str], site: str | None) -> Sequence[str]:
    """Return the sites to read from a public data set: only `site` if it is not None, otherwise all."""
    if site not in (None, *names):
        raise UserError(f"{source}: unknown site {site!r}; allowed: {', '.join(names)}")
    return names if site is None else (site,)


def concat_sites(sites: Sequence[Dataset], names: Sequence[str], global_test_x: Tensor | None = None) -> Dataset:
    """Concatenate the data sets of several sites into one that contains the site of each row.

    Args:
        global_test_x: the inputs of the global test set if they differ from the test inputs of the sites, for
            example in their standardisation; None: they are the same.
    """
    groups = [d.group for d in sites if d.group is not None]
    offsets = np.cumsum([0, *(int(group.max()) + 1 for group in groups)]).tolist()
    return Dataset(
        train_x=concatenate_samples([d.train_x for d in sites]),
        train_y=torch.cat([d.train_y for d in sites]),
        test_x=concatenate_samples([d.test_x for d in sites]),
        test_y=torch.cat([d.test_y for d in sites]),
        classes=sites[0].classes,
        site=torch.repeat_interleave(torch.tensor([len(d.train_y) for d in sites])),
        test_site=torch.repeat_interleave(torch.tensor([len(d.test_y) for d in sites])),
        site_names=tuple(names),
        global_test_x=global_test_x,
        preparation=find_common_preparation([d.preparation for d in sites]),
        group=torch.cat([g + n for g, n in zip(groups, offsets, strict=False)]) if len(groups) == len(sites) else None,
    )


# ---- files that hold samples by client ----
def to_uint8_if_exact(x: np.ndarray) -> np.ndarray:
    """Convert pixels x = v / 255 to the bytes v, which take less memory; return x unchanged if it has other values.

    Bytes are divided by 255 when a batch is read.
    """
    if x.dtype == np.uint8:
        return x
    with np.errstate(over="ignore"):
        values = np.rint(x * 255)
    if not ((values >= 0) & (values <= 255)).all():
        return x
    stored = values.astype(np.uint8)
    return stored if np.array_equal(to_float32(stored), x.astype(np.float32)) else x


def to_float32(x: np.ndarray) -> np.ndarray:
    """Convert an array to float32; bytes v become v / 255."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)


NO_SITE = -1  # the site of test rows whose client has no training rows


def with_clients_as_sites(
    data: Dataset, names: Sequence[str], owner: np.ndarray, test_owner: np.ndarray, shared_test: bool = False
) -> Dataset:
    """Return the data set with its clients as sites.

    A client without training rows does not become a site; its test rows belong to the global test set only.

    Args:
        data: the samples of all clients.
        names: the names of all clients.
        owner, test_owner: (n,) the client of each training row and of each test row, as an index into `names`.
        shared_test: whether the test part is common to all clients; if so, test_owner is ignored.
    """
    training_clients, test_clients = np.unique(owner), np.unique(test_owner)
    site_of_client = np.full(len(names), NO_SITE)
    site_of_client[training_clients] = np.arange(len(training_clients))
    has_own_tests = len(np.intersect1d(training_clients, test_clients)) > 0 and not shared_test
    return replace(
        data,
        site=torch.from_numpy(site_of_client[owner]),
        test_site=torch.from_numpy(site_of_client[test_owner]) if has_own_tests else None,
        site_names=tuple(names[k] for k in training_clients),
    )
