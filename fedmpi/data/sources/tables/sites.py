"""Sites that have too little to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.data.sources.tables.files import Table
from fedmpi.data.sources.tables.targets import Target


def check_sites(
    rows: Table, aim: Target, owner: np.ndarray, names: Sequence[str], train: np.ndarray, small: str, silo: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Rows to keep, (m,), whose each of them is, and the sites' names.

    small: what becomes of a site with fewer than two training rows, or one class in them: refuse, keep or drop. A site
    without any training row is refused where it is not dropped. silo: it is the only one here, and none drops it.
    """
    lost = []
    for k, name in enumerate(names):
        mine = np.flatnonzero((owner == k) & train)
        one = len(aim.names) > 1 and len(np.unique(aim.groups[mine])) == 1
        if len(mine) > 1 and not one:
            continue
        if small == "drop":
            lost.append(k)
        elif small == "refuse" or not len(mine):
            label = f"of one class, {aim.names[aim.groups[mine[0]]]!r}" if one and len(mine) > 1 else ""
            has = f"{count(len(mine), 'training row')}{' ' if label else ''}{label}"
            remedy = f"say data.small_sites: {'keep or drop' if len(mine) else 'drop'}"
            if silo:
                remedy = f"{'say data.small_sites: keep, or ' if len(mine) else ''}leave it out of data.silos"
            raise UserError(
                f"{rows.at(int(np.flatnonzero(owner == k)[0]))}: site {name!r}, which begins there, has {has}; {remedy}"
            )
    if len(lost) == len(names) and names:
        raise UserError(f"{rows.path}: no site is left: each has one training row, or one class")
    keep = np.flatnonzero(~np.isin(owner, lost))
    left = [k for k in range(len(names)) if k not in lost]
    number = np.zeros(max(len(names), 1), dtype=np.int64)
    number[left] = np.arange(len(left))
    return keep, number[owner[keep]], [names[k] for k in left]
