"""Handwritten digits of scikit-learn: 1,797 grey images of 8x8, 10 classes, no file needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import holdout


def digits(root: Path, *, test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2) -> Dataset:
    """Handwritten digits (UCI, by way of scikit-learn): 1,797 grey 8x8 images, 10 classes; no download.

    Pixels 0..16 are scaled to 0..1. test_fraction of each class is the test part, the same for every seed.
    """
    from sklearn.datasets import load_digits  # a second to import, and only this source needs it

    bunch = load_digits()
    x = torch.from_numpy(bunch.images / 16).float().unsqueeze(1)  # (1797, 1, 8, 8)
    y = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = (torch.from_numpy(rows) for rows in holdout(y.numpy(), test_fraction))
    return Dataset(x[train], y[train], x[test], y[test], classes=10)
