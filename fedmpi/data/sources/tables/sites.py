"""Whose each row of a table is, which rows are for training, and sites that have too little to learn from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, near_duplicates
from fedmpi.data.sources.common import holdout
from fedmpi.data.sources.tables.files import Table, ordered
from fedmpi.data.sources.tables.targets import Target

PARTS = {"train": True, "test": False, "val": True, "valid": True, "validation": True}  # whether it is trained on


def row_owners(rows: Table, site_column: str | None, site: str | None) -> tuple[np.ndarray, list[str]]:
    """Return (n,) the number of each row's site, and the sites' names.

    Without a column of sites these are zeros and the name of the silo `site`, if there is one.
    """
    if site_column is None:
        return np.zeros(len(rows), dtype=np.int64), [site] if site else []
    words = rows.words(site_column, "site_column")
    names = ordered(list(words))
    twice = near_duplicates(dict.fromkeys(words))
    if twice:
        first, last = (rows.at(int(np.flatnonzero(words == name)[0])) for name in twice)
        warnings.warn(
            f"data: {twice[0]!r} ({first}) and {twice[1]!r} ({last}) are two sites; are they one?", stacklevel=3
        )
    number = {name: k for k, name in enumerate(names)}
    return np.array([number[word] for word in words], dtype=np.int64), names


def training_rows(
    rows: Table, split_column: str | None, groups: np.ndarray, owner: np.ndarray, target: Target, fraction: float
) -> np.ndarray:
    """Return (n,) bool, whether a row is for training, by the column that says so, or drawn within each site.

    groups: (n,) what must stay together, such as the patient of each row; () where nothing must.
    """
    if split_column is not None:
        words = [word.casefold() for word in rows.words(split_column, "split_column")]
        for row, word in enumerate(words):
            if word not in PARTS:
                raise UserError(f"{rows.at(row)}: column {split_column!r} holds {word!r}; allowed: {', '.join(PARTS)}")
        return np.array([PARTS[word] for word in words], dtype=bool)
    train = np.ones(len(rows), dtype=bool)
    for k in np.unique(owner):
        own = np.flatnonzero(owner == k)
        train[own[holdout(target.groups[own], fraction, groups[own] if len(groups) else ())[1]]] = False
    return train


def check_sites(
    rows: Table, target: Target, owner: np.ndarray, names: Sequence[str], train: np.ndarray, small: str, silo: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Refuse or drop sites with fewer than two training rows, or one class in them.

    Args:
        small: refuse, keep or drop. A site without any training row is refused where it is not dropped.
        silo: whether it is the only site here, which cannot be dropped.

    Returns:
        The rows to keep (m,), the number of the site of each of them (m,), and the sites' names.
    """
    lost = []
    for k, name in enumerate(names):
        own = np.flatnonzero((owner == k) & train)
        one_class = len(target.names) > 1 and len(np.unique(target.groups[own])) == 1
        if len(own) > 1 and not one_class:
            continue
        if small == "drop":
            lost.append(k)
        elif small == "refuse" or not len(own):
            has = count(len(own), "training row")
            if one_class and len(own) > 1:
                has += f" of one class, {target.names[target.groups[own[0]]]!r}"
            remedy = f"say data.small_sites: {'keep or drop' if len(own) else 'drop'}"
            if silo:
                remedy = f"{'say data.small_sites: keep, or ' if len(own) else ''}leave it out of data.silos"
            first = rows.at(int(np.flatnonzero(owner == k)[0]))
            raise UserError(f"{first}: site {name!r}, which begins there, has {has}; {remedy}")
    if len(lost) == len(names) and names:
        raise UserError(f"{rows.path}: no site is left: each has one training row, or one class")
    keep = np.flatnonzero(~np.isin(owner, lost))
    left = [name for k, name in enumerate(names) if k not in lost]
    return keep, np.unique(owner[keep], return_inverse=True)[1], left
