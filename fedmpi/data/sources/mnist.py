"""MNIST and Fashion-MNIST from the four idx files that torchvision lays out, gzipped or not."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.common import find, pictures
from fedmpi.data.sources.idx import read_idx

LISTED = {"MNIST": "mnist", "FashionMNIST": "fashion_mnist"}  # folder: name of `fedmpi data`


def mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """MNIST (LeCun 1998): 60,000 + 10,000 grey 28x28 images of digits, in root/MNIST/raw.

    channels 3 repeats the grey channel, for models made for colour. Normalised with mean .1307, deviation .3081.
    """
    return _load("MNIST", root, download, channels, mean=0.1307, std=0.3081)


def fashion_mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """Fashion-MNIST (Xiao 2017): 60,000 + 10,000 grey 28x28 images of clothing, 10 classes, in root/FashionMNIST/raw.

    channels 3 repeats the grey channel. Normalised with mean .2860, deviation .3530 (of the training images).
    """
    return _load("FashionMNIST", root, download, channels, mean=0.2860, std=0.3530)


def _load(name: str, root: Path, download: bool, channels: int, mean: float, std: float) -> Dataset:
    ready(LISTED[name], root, download)
    train_x, train_y = _pair(name, root, "train")
    test_x, test_y = _pair(name, root, "t10k")
    if train_x.shape[1:] != test_x.shape[1:]:
        sizes = " and ".join(" x ".join(map(str, x.shape[2:])) for x in (train_x, test_x))
        raise UserError(f"{root / name / 'raw'}: the images of train and t10k are {sizes}; they must agree")
    return pictures((train_x, train_y), (test_x, test_y), 10, [mean], [std], channels)


def _pair(name: str, root: Path, part: str) -> tuple[np.ndarray, torch.Tensor]:
    """Images (n, 1, H, W) uint8 and labels (n,) int64 of one part, `train` or `t10k`."""
    images_at, labels_at = (_find(name, root, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    images = read_idx(images_at, 3, _remedy(images_at))
    labels = read_idx(labels_at, 1, _remedy(labels_at))
    if len(images) != len(labels):
        raise UserError(
            f"{images_at} holds {len(images)} images, {labels_at.name} {len(labels)} labels; they are not of one set, "
            f"delete both and set data.download=true"
        )
    if labels.max() > 9:
        row = int((labels > 9).argmax())
        raise UserError(
            f"{labels_at} holds the label {labels[row]} in row {row}; 0..9 is allowed; {_remedy(labels_at)}"
        )
    return images[:, None], torch.from_numpy(labels.astype(np.int64))


def _find(name: str, root: Path, file: str) -> Path:
    candidates = (f"{name}/raw/{file}", f"{name}/raw/{file}.gz")
    return find(root, candidates, name, advice(LISTED[name], root))


def _remedy(path: Path) -> str:
    return f"delete {path.name} and set data.download=true"
