"""Functions that several data sources share: find a file, hold out a test part, join sites."""

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

PART_BY_WORD = {  # the names of parts that are accepted in columns, and as names of folders and splits
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_ignored_target: ContextVar[float | str | None] = ContextVar("ignored", default=None)


@contextmanager
def set_ignored_target(target: float | str | None) -> Iterator[None]:
    """Set `task.ignore`, the target that loss and metrics leave out (number, "nan" or None), while sources are read."""
    token = _ignored_target.set(target)
    try:
        yield
    finally:
        _ignored_target.reset(token)


def get_ignored_target() -> float | str | None:
    """Return `task.ignore`, the target that loss and metrics leave out."""
    return _ignored_target.get()


def missing_targets_allowed() -> bool:
    """Return whether targets may be missing; missing targets are stored as NaN."""
    return get_ignored_target() == "nan"


def find_file(root: Path, candidates: Sequence[str], what: str, remedy: str) -> Path:
    """Return the first of the candidate paths, relative to root, that is a regular file.

    Raise MissingDataError, with the remedy, if none exists; UserError if one exists but is not a regular file. `what`
    is the name of the data source.
    """
    paths = [root / candidate for candidate in candidates]
    for path in paths:
        if os.path.isfile(path):
            return path
    for path in paths:
        if os.path.lexists(path):
            kind = "a directory" if os.path.isdir(path) else "a broken link, pipe or device"
            raise UserError(f"{what}: {path} is {kind}, not a file (data.root = {root}); {remedy}")
    raise MissingDataError(f"{what}: there is no file {' or '.join(map(str, paths))} (data.root = {root}); {remedy}")


def resolve_file_name(source: str, site: str | None, path: str | None, key: str = "path") -> str:
    """Return the name of the file to read, relative to `data.root`.

    In silo mode {site} in `path` is replaced by the name of the silo; without `path` the silo's name is the file's
    name. `key` is the option that holds `path`, for messages.
    """
    if site is None and not path:
        raise UserError(f"{source}: data.{key} is missing; it names the file, relative to data.root")
    if site is not None and path and "{site}" not in path:
        raise UserError(
            f"{source}: data.{key}: {path!r} would be one file for all silos; write {{site}} where they differ"
        )
    return (path or "{site}").replace("{site}", site or "{site}")


def check_finite(x: Tensor, name: str, at: Path | str, nan: bool = False) -> Tensor:
    """Return x (n, ...) if all numbers are finite, or NaN with `nan`; otherwise raise UserError with the first row."""
    is_good = ~torch.isinf(x) if nan else torch.isfinite(x)
    if not bool(is_good.all()):
        row = int((~is_good.flatten(1).all(1) if x.ndim > 1 else ~is_good).nonzero()[0, 0])
        value = x[row][~is_good[row]].flatten()[0].item()
        raise UserError(
            f"{at}: {name} holds {value} in row {row} (of float32, which ends at 3.4e38); finite numbers are needed: "
            "fill or drop it"
        )
    return x


def resolve_test_fraction(given: float | None, own: str = "") -> float:
    """Return `data.test_fraction`, default 0.2; raise UserError if it is set although `own` defines the test part."""
    if own and given is not None:
        raise UserError(f"data.test_fraction: {given:g} changes nothing, for {own} says the test part; leave it out")
    return 0.2 if given is None else given


def split_train_test(
    labels: np.ndarray, fraction: float, groups: Sequence[str] | np.ndarray = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Draw round(fraction n_c) of the n_c samples of each class as test rows; return sorted training and test indices.

    At least one sample of each class remains for training. The draw does not depend on the seed of the experiment: the
    test part belongs to the data.

    Args:
        labels: (n,) class numbers. Real-valued targets (regression) count as one class.
        fraction: the share of test samples.
        groups: (n,) the group of each sample, such as its patient. Whole groups are drawn then; the class of a group is
            that of its first sample.
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
    groups: Sequence[str] | np.ndarray, train: Sequence[bool] | np.ndarray, at: Callable[[int], str]
) -> None:
    """Raise UserError if a group has training and test rows.

    groups: (n,); train: (n,) whether a row is a training row; at: returns the file and line of a row.
    """
    seen = {group: k for k, (group, trained) in enumerate(zip(groups, train, strict=False)) if trained}
    for k, (group, trained) in enumerate(zip(groups, train, strict=False)):
        if group in seen and not trained:
            parts = f"this one is of the test part, and {at(seen[group])} of the training part"
            problem = f"rows of {group!r} (data.group_column) are to stay together, {parts}"
            raise UserError(f"{at(k)}: {problem}; correct the column of the parts, or leave data.group_column out")


def encode_groups(groups: Sequence[str] | np.ndarray) -> Tensor | None:
    """Return the number of each row's group, (n,) int64, as `Dataset.group` holds it; None without groups."""
    return torch.from_numpy(np.unique(groups, return_inverse=True)[1]) if len(groups) else None


def select_sites(what: str, names: Sequence[str], site: str | None) -> Sequence[str]:
    """Return the requested silo as a tuple of one name, or the names of all sites of a public data set."""
    if site not in (None, *names):
        raise UserError(f"{what}: there is no site {site!r}; allowed: {', '.join(names)}")
    return names if site is None else (site,)


def concat_sites(sites: Sequence[Dataset], names: Sequence[str], global_test_x: Tensor | None = None) -> Dataset:
    """Concatenate the data sets of several sites, and store the site of each row.

    global_test_x: see `Dataset.global_test_x`.
    """
    groups = [d.group for d in sites if d.group is not None]
    beyond = np.cumsum([0, *(int(group.max()) + 1 for group in groups)]).tolist()
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
        group=torch.cat([g + n for g, n in zip(groups, beyond, strict=False)]) if len(groups) == len(sites) else None,
    )


# ---- files that hold samples by client ----
def to_uint8_if_exact(x: np.ndarray) -> np.ndarray:
    """Return pixels v as uint8 if v / 255 is exactly x in float32, which saves memory; otherwise return x.

    Images that are stored as bytes are divided by 255 when a batch is read.
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
    """Return x as float32; bytes v become v / 255."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)


NO_SITE = -1  # the site of test rows whose client has no training rows


def with_clients_as_sites(
    data: Dataset, names: Sequence[str], owner: np.ndarray, test_owner: np.ndarray, shared_test: bool = False
) -> Dataset:
    """Return the data set with its clients as sites.

    A client without training rows does not become a site: its test rows are in the global test set only.

    Args:
        data: the samples of all clients.
        names: the names of all clients.
        owner, test_owner: (n,) the client of each training row and of each test row, as an index into `names`.
        shared_test: ignore test_owner; the test part is common to all clients.
    """
    trained, tested = np.unique(owner), np.unique(test_owner)
    number = np.full(len(names), NO_SITE)
    number[trained] = np.arange(len(trained))
    has_own_tests = len(np.intersect1d(trained, tested)) > 0 and not shared_test
    return replace(
        data,
        site=torch.from_numpy(number[owner]),
        test_site=torch.from_numpy(number[test_owner]) if has_own_tests else None,
        site_names=tuple(names[k] for k in trained),
    )
