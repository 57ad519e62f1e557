"""What several sources need: finding a file, standardising pixels, holding out a test part, joining sites."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset


def find(root: Path, candidates: Sequence[str], what: str, remedy: str) -> Path:
    """The first of the candidate paths under root that is a regular file; UserError if none is."""
    paths = [root / candidate for candidate in candidates]
    for path in paths:
        if os.path.isfile(path):
            return path
    for path in paths:
        if os.path.lexists(path):
            odd = "a directory" if os.path.isdir(path) else "a broken link, pipe or device"
            raise UserError(f"{what}: {path} is {odd}, not a file (data.root = {root}); {remedy}")
    raise UserError(f"{what}: there is no file {' or '.join(map(str, paths))} (data.root = {root}); {remedy}")


def finite(x: Tensor, name: str, at: Path) -> Tensor:
    """x, (n, ...); UserError with the first row that holds NaN or an infinity."""
    good = torch.isfinite(x)
    if not bool(good.all()):
        row = int((~good.flatten(1).all(1) if x.ndim > 1 else ~good).nonzero()[0, 0])
        odd = x[row][~good[row]].flatten()[0].item()
        raise UserError(
            f"{at}: {name} holds {odd} in row {row} (of float32, which ends at 3.4e38); finite numbers are needed: "
            "fill or drop it"
        )
    return x


def holdout(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Training and test indices, sorted: of each class round(fraction n_c) samples are test, but never its last one.

    The test part belongs to the data, not to the experiment: the draw does not depend on the experiment's seed.
    Real-valued targets (regression) count as one class.
    """
    rng = seeds.numpy_rng(0, "holdout")
    groups = labels if labels.dtype.kind in "iu" else np.zeros(len(labels), dtype=np.int64)
    test = []
    for group in np.unique(groups):
        rows = rng.permutation(np.flatnonzero(groups == group))
        test.append(rows[: min(round(fraction * len(rows)), len(rows) - 1)])
    held = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), held), held


def pixels(images: np.ndarray, mean: Sequence[float], std: Sequence[float], channels: int) -> Tensor:
    """(v / 255 - mean) / std per channel.  (n, C, H, W) uint8 -> (n, channels, H, W) float32; C = 1 may be repeated."""
    x = torch.from_numpy(np.ascontiguousarray(images)).float().div_(255)
    x.sub_(torch.tensor(mean).view(1, -1, 1, 1)).div_(torch.tensor(std).view(1, -1, 1, 1))
    return x if x.shape[1] == channels else x.repeat(1, channels, 1, 1)


def joined(sites: Sequence[Dataset], names: Sequence[str]) -> Dataset:
    """One data set of all sites, one after the other, with the site of each row."""
    return Dataset(
        train_x=torch.cat([d.train_x for d in sites]),
        train_y=torch.cat([d.train_y for d in sites]),
        test_x=torch.cat([d.test_x for d in sites]),
        test_y=torch.cat([d.test_y for d in sites]),
        classes=sites[0].classes,
        site=torch.repeat_interleave(torch.tensor([len(d.train_y) for d in sites])),
        test_site=torch.repeat_interleave(torch.tensor([len(d.test_y) for d in sites])),
        site_names=tuple(names),
    )
