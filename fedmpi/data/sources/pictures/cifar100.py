"""CIFAR-100 from torchvision's folder `cifar-100-python`."""

from __future__ import annotations

from pathlib import Path

from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.cifar10 import part
from fedmpi.data.sources.common import pictures

MEAN, STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)  # of the training images, per channel


def cifar100(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 100 classes, in root/cifar-100-python.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    train, test = part("cifar100", root, True, download), part("cifar100", root, False, download)
    return pictures(train, test, 100, MEAN, STD, 3)
