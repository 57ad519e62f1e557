"""MNIST, Fashion-MNIST and EMNIST from idx files in the folders of torchvision, gzipped or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.common import find, pictures

EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
Part = tuple[np.ndarray, torch.Tensor]  # images (n, 1, H, W) uint8, labels (n,) int64


def mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """MNIST (LeCun 1998): 60,000 + 10,000 grey 28x28 images of digits, in root/MNIST/raw.

    channels 3 repeats the grey channel, for models made for colour. Normalised with mean .1307, deviation .3081.
    """
    ready("mnist", root, download)
    train, test = (_part("mnist", root, f"MNIST/raw/{part}", 10) for part in ("train", "t10k"))
    return _joined(root / "MNIST/raw", train, test, channels, 0.1307, 0.3081)


def fashion_mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """Fashion-MNIST (Xiao 2017): 60,000 + 10,000 grey 28x28 images of clothing, 10 classes, in root/FashionMNIST/raw.

    channels 3 repeats the grey channel. Normalised with mean .2860, deviation .3530 (of the training images).
    """
    ready("fashion_mnist", root, download)
    train, test = (_part("fashion_mnist", root, f"FashionMNIST/raw/{part}", 10) for part in ("train", "t10k"))
    return _joined(root / "FashionMNIST/raw", train, test, channels, 0.2860, 0.3530)


def emnist(root: Path, *, download: bool = False, split: Split = "balanced", channels: Literal[1, 3] = 1) -> Dataset:
    """EMNIST (Cohen 2017): grey 28x28 images of letters and digits, in root/EMNIST/raw, gzipped or not.

    split: byclass (814,255 images, 62 classes), bymerge (814,255, 47), balanced (131,600, 47), letters (145,600, 26),
    digits (280,000, 10), mnist (70,000, 10). The files hold the images on their side; they are turned upright. letters
    are numbered from 0. channels 3 repeats the grey channel. Normalised as MNIST: mean .1307, deviation .3081.
    """
    ready("emnist", root, download)
    classes, first = EMNIST_CLASSES[split], 1 if split == "letters" else 0  # a is 1 there
    parts = (_part("emnist", root, f"EMNIST/raw/emnist-{split}-{part}", classes, first) for part in ("train", "test"))
    train, test = ((images.transpose(0, 1, 3, 2), labels) for images, labels in parts)
    return pictures(train, test, classes, (0.1307,), (0.3081,), channels)


def _joined(at: Path, train: Part, test: Part, channels: int, mean: float, std: float) -> Dataset:
    if train[0].shape[1:] != test[0].shape[1:]:
        sizes = " and ".join(" x ".join(map(str, x.shape[2:])) for x, _ in (train, test))
        raise UserError(f"{at}: the images of train and t10k are {sizes}; they must agree")
    return pictures(train, test, 10, (mean,), (std,), channels)


def _part(name: str, root: Path, stem: str, classes: int, first: int = 0) -> Part:
    """Images and labels of the two idx files whose names begin with `stem`; first: the label of class 0."""
    kinds = ("images-idx3", "labels-idx1")
    files = [tuple(f"{stem}-{kind}-ubyte{end}" for end in ("", ".gz")) for kind in kinds]
    images_at, labels_at = (find(root, candidates, name, advice(name, root)) for candidates in files)
    images, labels = read_idx(images_at, 3), read_idx(labels_at, 1)
    if len(images) != len(labels):
        raise UserError(
            f"{images_at} holds {len(images)} images, {labels_at.name} {len(labels)} labels; they are not of one set, "
            f"delete both and set data.download=true"
        )
    odd = (labels < first) | (labels >= classes + first)
    if odd.any():
        row = int(odd.argmax())
        allowed = f"{first}..{classes - 1 + first} is allowed; {_remedy(labels_at)}"
        raise UserError(f"{labels_at} holds the label {labels[row]} in row {row}; {allowed}")
    return images[:, None], torch.from_numpy(labels.astype(np.int64) - first)


def _remedy(path: Path) -> str:
    return f"delete {path.name} and set data.download=true"


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """uint8 array of `ndim` dimensions, of an idx file, gzipped or not.

    Big-endian header: 0x0000, type (0x08 = unsigned byte), number of dimensions, one uint32 a dimension; then data.
    The file is unpacked in memory: its folder may be read-only. torchvision reads no gzipped files, and importing it
    takes each rank a second. Raises UserError, naming the file, if its content contradicts its header.
    """
    remedy = _remedy(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
    head = 4 + 4 * ndim
    if len(data) < head or data[:4] != bytes((0, 0, 8, ndim)):
        raise UserError(
            f"{path} is not an idx file of bytes with {ndim} dimensions: it starts with {data[:4].hex()}, not "
            f"000008{ndim:02x}; {remedy}"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", ndim, offset=4))
    size = math.prod(shape)  # numpy's would wrap around at 2^64
    if len(data) - head != size:
        raise UserError(
            f"{path} is damaged: its header says {' x '.join(map(str, shape))} = {size} bytes, {len(data) - head} "
            f"follow; {remedy}"
        )
    if size == 0:
        raise UserError(f"{path} is empty: its header says {' x '.join(map(str, shape))}; {remedy}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape).copy()  # frombuffer's view is read-only
