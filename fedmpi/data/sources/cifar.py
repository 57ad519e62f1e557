"""CIFAR-10 and CIFAR-100 from the folders of torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, find, ready
from fedmpi.data.sources.common import pictures


def cifar10(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 10 classes, in root/cifar-10-batches-py.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    return _dataset("cifar10", root, download, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def cifar100(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 100 classes, in root/cifar-100-python.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    return _dataset("cifar100", root, download, (0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


def _dataset(name: str, root: Path, download: bool, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """mean, std: of the training images, per channel."""
    ready(name, root, download)
    train, test = _part(name, root, True), _part(name, root, False)
    return pictures(train, test, int(name.removeprefix("cifar")), mean, std, 3)


def _part(name: str, root: Path, train: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) of `cifar10` or `cifar100`."""
    from fedmpi.common.torchvision_compat import torchvision

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
