"""EMNIST: six splits of handwritten letters and digits, in idx files as torchvision names them."""

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

CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


def emnist(root: Path, *, download: bool = False, split: Split = "balanced", channels: Literal[1, 3] = 1) -> Dataset:
    """EMNIST (Cohen 2017): grey 28x28 images of letters and digits, in root/EMNIST/raw, gzipped or not.

    split: byclass (814,255 images, 62 classes), bymerge (814,255, 47), balanced (131,600, 47), letters (145,600, 26),
    digits (280,000, 10), mnist (70,000, 10). The files hold the images on their side; they are turned upright. letters
    are numbered from 0. channels 3 repeats the grey channel. Normalised as MNIST: mean .1307, deviation .3081.
    """
    ready("emnist", root, download)
    train, test = (_part(root, split, part) for part in ("train", "test"))
    return pictures(train, test, CLASSES[split], (0.1307,), (0.3081,), channels)


def _part(root: Path, split: str, part: str) -> tuple[np.ndarray, torch.Tensor]:
    remedy = advice("emnist", root)
    at = {}
    for kind in ("images-idx3", "labels-idx1"):
        name = f"EMNIST/raw/emnist-{split}-{part}-{kind}-ubyte"
        at[kind] = find(root, (name, f"{name}.gz"), "emnist", remedy)
    images, labels = read_idx(at["images-idx3"], 3, remedy), read_idx(at["labels-idx1"], 1, remedy)
    if len(images) != len(labels):
        raise UserError(
            f"{at['images-idx3']} holds {len(images)} images, {at['labels-idx1'].name} {len(labels)} labels"
        )
    first = 1 if split == "letters" else 0  # a is 1 there
    odd = (labels < first) | (labels >= CLASSES[split] + first)
    if odd.any():
        row = int(odd.argmax())
        raise UserError(
            f"{at['labels-idx1']} holds the label {labels[row]} in row {row}; {first}..{CLASSES[split] - 1 + first} is "
            f"allowed; {remedy}"
        )
    return images.transpose(0, 2, 1)[:, None], torch.from_numpy(labels.astype(np.int64) - first)
