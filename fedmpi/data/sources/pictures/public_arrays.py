"""Public image sets whose files hold arrays: MNIST and its kin, CIFAR, SVHN, STL-10, MedMNIST."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.catalogue import MEDMNIST, medmnist_file
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.arrays import channels_first
from fedmpi.data.sources.common import find, pictures

EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
STL10_SIDE = 96  # pixels
MedMNISTName = Literal[
    "pathmnist",
    "chestmnist",
    "dermamnist",
    "octmnist",
    "pneumoniamnist",
    "retinamnist",
    "breastmnist",
    "bloodmnist",
    "tissuemnist",
    "organamnist",
    "organcmnist",
    "organsmnist",
]
Part = tuple[np.ndarray, torch.Tensor]  # images (n, C, H, W) uint8 and labels (n,) int64


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    """Turn what a damaged file makes of its reader, which is not to be foreseen, into one UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error}; delete it, and {remedy}") from error


def _check_labels(labels: np.ndarray, low: int, high: int) -> None:
    """Raise ValueError with the first label that is not in low..high. labels: (n,), or (n, m) of m labels an image."""
    wrong = (labels < low) | (labels > high)
    if wrong.any():
        row = int(wrong.reshape(len(wrong), -1).any(1).argmax())
        raise ValueError(f"it holds the label {labels[wrong][0]} in row {row}; {low}..{high} is allowed")


# ---- MNIST and its kin ----
def mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """MNIST (LeCun 1998): 60,000 + 10,000 grey 28x28 images of digits, in root/MNIST/raw.

    channels 3 repeats the grey channel, for models made for colour. Normalised with mean .1307, deviation .3081.
    """
    return _mnist("mnist", root, "MNIST/raw", download, channels, 0.1307, 0.3081)


def fashion_mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """Fashion-MNIST (Xiao 2017): 60,000 + 10,000 grey 28x28 images of clothing, 10 classes, in root/FashionMNIST/raw.

    channels 3 repeats the grey channel. Normalised with mean .2860, deviation .3530 (of the training images).
    """
    return _mnist("fashion_mnist", root, "FashionMNIST/raw", download, channels, 0.2860, 0.3530)


def _mnist(name: str, root: Path, folder: str, download: bool, channels: int, mean: float, std: float) -> Dataset:
    ready(name, root, download)
    train, test = (_idx_part(name, root, f"{folder}/{part}", 10) for part in ("train", "t10k"))
    return pictures(train, test, 10, (mean,), (std,), channels)


def emnist(root: Path, *, download: bool = False, split: Split = "balanced", channels: Literal[1, 3] = 1) -> Dataset:
    """EMNIST (Cohen 2017): grey 28x28 images of letters and digits, in root/EMNIST/raw, gzipped or not.

    split: byclass (814,255 images, 62 classes), bymerge (814,255, 47), balanced (131,600, 47), letters (145,600, 26),
    digits (280,000, 10), mnist (70,000, 10). The files hold the images on their side; they are turned upright. letters
    are numbered from 0. channels 3 repeats the grey channel. Normalised as MNIST: mean .1307, deviation .3081.
    """
    ready("emnist", root, download)
    classes, first = EMNIST_CLASSES[split], 1 if split == "letters" else 0  # a is 1 there
    stems = (f"EMNIST/raw/emnist-{split}-{part}" for part in ("train", "test"))
    parts = (_idx_part("emnist", root, stem, classes, first) for stem in stems)
    train, test = ((images.transpose(0, 1, 3, 2), labels) for images, labels in parts)
    return pictures(train, test, classes, (0.1307,), (0.3081,), channels)


def _idx_part(name: str, root: Path, stem: str, classes: int, first: int = 0) -> Part:
    """Images and labels of the two idx files whose names begin with `stem`; first: the label of class 0."""
    remedy, arrays = advice(name, root), []
    for kind, ndim in (("images-idx3", 3), ("labels-idx1", 1)):
        path = find(root, [f"{stem}-{kind}-ubyte{end}" for end in ("", ".gz")], name, remedy)
        with _reading(path, remedy):
            arrays.append(read_idx(path, ndim))
    images, labels = arrays
    with _reading(path, remedy):
        if len(images) != len(labels):
            raise ValueError(f"it holds {len(labels)} labels of {len(images)} images")
        _check_labels(labels, first, classes - 1 + first)
    return images[:, None], torch.from_numpy(labels.astype(np.int64) - first)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """uint8 array of `ndim` dimensions, of an idx file, gzipped or not.

    Big-endian header: 0x0000, type (0x08 = unsigned byte), number of dimensions, one uint32 a dimension; then data.
    The file is unpacked in memory: its folder may be read-only. torchvision reads no gzipped files, and importing it
    takes each rank a second. Raises ValueError if the content contradicts the header.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if data[:4] != bytes((0, 0, 8, ndim)):
        raise ValueError(f"it is no idx file of bytes with {ndim} dimensions")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", ndim, offset=4))
    content = len(data) - 4 - 4 * ndim
    if not content or content != math.prod(shape):  # numpy's product would wrap around at 2^64
        raise ValueError(f"its header says {' x '.join(map(str, shape))} bytes, {content} follow")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy()  # a view would be read-only


# ---- CIFAR, SVHN, STL-10 ----
def cifar10(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 10 classes, in root/cifar-10-batches-py.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _cifar("cifar10", 10, root, "cifar-10-batches-py", download, mean, std)


def cifar100(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 100 classes, in root/cifar-100-python.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    mean, std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
    return _cifar("cifar100", 100, root, "cifar-100-python", download, mean, std)


def _cifar(
    name: str, classes: int, root: Path, folder: str, download: bool, mean: Sequence[float], std: Sequence[float]
) -> Dataset:
    """mean, std: of the training images, per channel."""
    from fedmpi.common.torchvision_compat import torchvision

    ready(name, root, download)
    kind = getattr(torchvision.datasets, name.upper())
    try:
        train, test = (kind(root, train=train) for train in (True, False))
    except (OSError, RuntimeError) as error:
        wrong = UserError if (root / folder).exists() else MissingDataError
        reason = f"{root / folder} is missing or its checksums differ (data.root = {root}; {error})"
        raise wrong(f"{name}: {reason}; {advice(name, root)}") from error
    x, test_x = (part.data.transpose(0, 3, 1, 2) for part in (train, test))
    return pictures((x, torch.tensor(train.targets)), (test_x, torch.tensor(test.targets)), classes, mean, std, 3)


def svhn(root: Path, *, download: bool = False) -> Dataset:
    """SVHN (Netzer 2011): 73,257 + 26,032 colour 32x32 house numbers, 10 classes, in root/SVHN or root.

    Files train_32x32.mat and test_32x32.mat.
    """
    ready("svhn", root, download)
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)  # of the training images, per channel
    return pictures(_svhn_part(root, "train"), _svhn_part(root, "test"), 10, mean, std, 3)


def _svhn_part(root: Path, part: str) -> Part:
    from scipy import io  # here: importing it sets an environment variable

    file, remedy = f"{part}_32x32.mat", advice("svhn", root)
    path = find(root, (f"SVHN/{file}", file), "svhn", remedy)
    with _reading(path, remedy):
        content = io.loadmat(path, variable_names=("X", "y"))
        x, y = content["X"], content["y"].astype(np.int64).ravel()
        if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)):
            raise ValueError(f"X is {x.dtype} {x.shape} for {len(y)} labels; uint8 (32, 32, 3, n) is needed")
        _check_labels(y, 1, 10)
    return x.transpose(3, 2, 0, 1), torch.from_numpy(y % 10)  # 10 is the digit 0


def stl10(root: Path, *, download: bool = False) -> Dataset:
    """STL-10 (Coates 2011): 5,000 + 8,000 colour 96x96 images, 10 classes, in root/stl10_binary.

    Normalised with mean .5, deviation .5 (FedUV). Its 100,000 images without labels are not read.
    """
    ready("stl10", root, download)
    return pictures(_stl10_part(root, "train"), _stl10_part(root, "test"), 10, (0.5,), (0.5,), 3)


def _stl10_part(root: Path, part: str) -> Part:
    remedy = advice("stl10", root)
    x_at, y_at = (find(root, (f"stl10_binary/{part}_{kind}.bin",), "stl10", remedy) for kind in "Xy")
    with _reading(x_at, remedy):
        x, y = np.fromfile(x_at, np.uint8), np.fromfile(y_at, np.uint8).astype(np.int64)
        size = 3 * STL10_SIDE**2
        if len(x) != size * len(y):
            raise ValueError(f"it holds {len(x):,} bytes for {len(y)} labels; {size:,} an image are needed")
        _check_labels(y, 1, 10)
    images = x.reshape(-1, 3, STL10_SIDE, STL10_SIDE).transpose(0, 1, 3, 2)  # they lie column by column
    return images, torch.from_numpy(y - 1)


# ---- MedMNIST ----
def medmnist(
    root: Path,
    *,
    set: MedMNISTName,
    download: bool = False,
    size: Literal[28, 64, 128, 224] = 28,
    channels: Literal[1, 3] | None = None,
    val: Literal["join", "leave"] = "join",
) -> Dataset:
    """MedMNIST v2 (Yang 2023): twelve sets of medical 28x28 images, from root/medmnist/SET.npz or root/SET.npz.

    set: its name; size: 64, 128 and 224 are MedMNIST+'s files SET_64.npz, ... channels: 3 repeats a grey channel; as it
    is otherwise. val: the validation part joins the training part, as in FedSOL's PathMNIST and TissueMNIST, or is left
    out. Normalised with mean .5, deviation .5. chestmnist has 14 labels an image, each there or not (task multi_label);
    retinamnist's five grades are classes.
    """
    row, listed = MEDMNIST[set], medmnist_file(set, size)
    if channels is not None and channels < row.channels:
        raise UserError(f"medmnist: data.channels=1, but {set} is in colour; leave it out")
    ready(listed, root, download)
    remedy = advice(listed, root)
    at = find(root, (f"medmnist/{listed}.npz", f"{listed}.npz"), f"medmnist {set}", remedy)
    labels_an_image = row.classes if set == "chestmnist" else 1
    shape, most = (row.channels, size, size), 1 if labels_an_image > 1 else row.classes - 1
    with _reading(at, remedy), np.load(at, allow_pickle=False) as arrays:

        def part(*names: str) -> Part:
            images, labels = (
                np.concatenate([arrays[f"{name}_{kind}"] for name in names]) for kind in ("images", "labels")
            )
            x = channels_first(images, "NHWC"[: images.ndim])
            if x.dtype != np.uint8 or x.shape[1:] != shape or labels.shape != (len(x), labels_an_image):
                what = f"images {x.dtype} {x.shape}, labels {labels.shape}"
                raise ValueError(f"{names[0]}: {what}; {set} has images {shape} with {labels_an_image} labels each")
            _check_labels(labels, 0, most)
            return x, torch.from_numpy(
                labels.astype(np.float32) if labels_an_image > 1 else labels[:, 0].astype(np.int64)
            )

        train, test = part("train", "val") if val == "join" else part("train"), part("test")
    return pictures(train, test, row.classes, (0.5,), (0.5,), channels or row.channels)
