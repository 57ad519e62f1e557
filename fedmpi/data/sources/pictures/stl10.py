"""STL-10 from its binary files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.common import find, pictures

SIDE, CLASSES = 96, 10


def stl10(root: Path, *, download: bool = False) -> Dataset:
    """STL-10 (Coates 2011): 5,000 + 8,000 colour 96x96 images, 10 classes, in root/stl10_binary.

    Normalised with mean .5, deviation .5 (FedUV). Its 100,000 images without labels are not read.
    """
    ready("stl10", root, download)
    return pictures(_part(root, "train"), _part(root, "test"), CLASSES, (0.5,), (0.5,), 3)


def _part(root: Path, part: str) -> tuple[np.ndarray, torch.Tensor]:
    remedy = advice("stl10", root)
    x_at, y_at = (find(root, (f"stl10_binary/{part}_{kind}.bin",), "stl10", remedy) for kind in "Xy")
    try:
        x, y = np.fromfile(x_at, np.uint8), np.fromfile(y_at, np.uint8).astype(np.int64)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; {remedy}") from error
    one = 3 * SIDE * SIDE
    if not len(y) or len(x) != one * len(y):
        raise UserError(
            f"{x_at} holds {len(x):,} bytes, {y_at.name} {len(y)} labels; {one:,} bytes an image are needed; {remedy}"
        )
    if y.min() < 1 or y.max() > CLASSES:
        row = int(((y < 1) | (y > CLASSES)).argmax())
        raise UserError(f"{y_at} holds the label {y[row]} in row {row}; 1..{CLASSES} is allowed; {remedy}")
    images = x.reshape(-1, 3, SIDE, SIDE).transpose(0, 1, 3, 2)  # they lie column by column
    return images, torch.from_numpy(y - 1)
