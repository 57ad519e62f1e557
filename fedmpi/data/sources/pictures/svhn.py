"""SVHN from its files of MATLAB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.common import find, pictures

MEAN, STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)  # of the training images, per channel


def svhn(root: Path, *, download: bool = False, extra: bool = False) -> Dataset:
    """SVHN (Netzer 2011): 73,257 + 26,032 colour 32x32 house numbers, 10 classes, in root/SVHN or root.

    Files train_32x32.mat, test_32x32.mat and, with extra, extra_32x32.mat: 531,131 more for training.
    """
    ready("svhn", root, download)
    train = _part(root, "train", "svhn")
    if extra:
        ready("svhn_extra", root, download)
        more = _part(root, "extra", "svhn_extra")
        train = np.concatenate([train[0], more[0]]), torch.cat([train[1], more[1]])
    return pictures(train, _part(root, "test", "svhn"), 10, MEAN, STD, 3)


def _part(root: Path, part: str, listed: str) -> tuple[np.ndarray, torch.Tensor]:
    file, remedy = f"{part}_32x32.mat", advice(listed, root)
    path = find(root, (f"SVHN/{file}", file), "svhn", remedy)
    from scipy import io  # here: importing it sets an environment variable

    try:
        content = io.loadmat(path, variable_names=("X", "y"))
        x, y = content["X"], content["y"].astype(np.int64).ravel()
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.shape[3] != len(y):
            raise ValueError(
                f"X is {x.dtype} {x.shape}, y {content['y'].shape}; uint8 (32, 32, 3, n) and (n, 1) are needed"
            )
    except Exception as error:  # what a damaged file makes of the reader is not to be foreseen
        said = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} cannot be read: {said}; delete it, and {remedy}") from error
    if y.min() < 1 or y.max() > 10:
        row = int(((y < 1) | (y > 10)).argmax())
        raise UserError(f"{path} holds the label {y[row]} in row {row}; 1..10 is allowed, 10 for the digit 0; {remedy}")
    return x.transpose(3, 2, 0, 1), torch.from_numpy(y % 10)
