"""CIFAR-10 from torchvision's folder `cifar-10-batches-py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, find, ready
from fedmpi.data.sources.common import pictures

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, per channel


def cifar10(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 10 classes, in root/cifar-10-batches-py.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    train, test = part("cifar10", root, True, download), part("cifar10", root, False, download)
    return pictures(train, test, 10, MEAN, STD, 3)


def part(name: str, root: Path, train: bool, download: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) of `cifar10` or `cifar100`."""
    from fedmpi.common.torchvision_compat import torchvision

    ready(name, root, download)
    folder = find(name).downloads[0].into
    try:
        read = getattr(torchvision.datasets, name.upper())(root, train=train)
    except (OSError, RuntimeError) as error:
        wrong = UserError if (root / folder).exists() else MissingDataError
        raise wrong(
            f"{name}: {root / folder} is missing or its checksums differ (data.root = {root}; {error}); "
            f"{advice(name, root)}"
        ) from error
    return read.data.transpose(0, 3, 1, 2), torch.tensor(read.targets)
