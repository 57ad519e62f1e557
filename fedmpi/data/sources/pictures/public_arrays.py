"""Public image sets whose files hold arrays: MNIST and its kin, CIFAR, SVHN, STL-10, MedMNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching import getting
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
    if train[0].shape[1:] != test[0].shape[1:]:
        sizes = " and ".join(" x ".join(map(str, x.shape[2:])) for x, _ in (train, test))
        raise UserError(f"{root / folder}: the images of train and t10k are {sizes}; they must agree")
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
    kinds = ("images-idx3", "labels-idx1")
    files = [tuple(f"{stem}-{kind}-ubyte{end}" for end in ("", ".gz")) for kind in kinds]
    images_at, labels_at = (find(root, candidates, name, advice(name, root)) for candidates in files)
    images, labels = read_idx(images_at, 3), read_idx(labels_at, 1)
    if len(images) != len(labels):
        raise UserError(
            f"{images_at} holds {len(images)} images, {labels_at.name} {len(labels)} labels; they are not of one set, "
            f"delete both and set data.download=true"
        )
    _check_labels(f"{labels_at} holds", labels, first, classes - 1 + first, _remedy(labels_at))
    return images[:, None], torch.from_numpy(labels.astype(np.int64) - first)


def _check_labels(whose: str, labels: np.ndarray, low: int, high: int, remedy: str) -> None:
    """Raise UserError with the first label that is not in low..high. labels: (n,), or (n, m) of m labels an image."""
    odd = (labels < low) | (labels > high)
    if odd.any():
        row = int(odd.reshape(len(odd), -1).any(1).argmax())
        raise UserError(f"{whose} the label {labels[odd][0]} in row {row}; {low}..{high} is allowed; {remedy}")


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


def cifar10(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 10 classes, in root/cifar-10-batches-py.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    return _cifar("cifar10", root, download, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def cifar100(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 100 classes, in root/cifar-100-python.

    The files are pickles; they are opened by torchvision, which compares their checksums first, and by nothing else.
    """
    return _cifar("cifar100", root, download, (0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


def _cifar(name: str, root: Path, download: bool, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """mean, std: of the training images, per channel."""
    ready(name, root, download)
    train, test = _cifar_part(name, root, True), _cifar_part(name, root, False)
    return pictures(train, test, int(name.removeprefix("cifar")), mean, std, 3)


def _cifar_part(name: str, root: Path, train: bool) -> Part:
    from fedmpi.common.torchvision_compat import torchvision

    folder = getting.find(name).downloads[0].into
    try:
        read = getattr(torchvision.datasets, name.upper())(root, train=train)
    except (OSError, RuntimeError) as error:
        wrong = UserError if (root / folder).exists() else MissingDataError
        raise wrong(
            f"{name}: {root / folder} is missing or its checksums differ (data.root = {root}; {error}); "
            f"{advice(name, root)}"
        ) from error
    return read.data.transpose(0, 3, 1, 2), torch.tensor(read.targets)


def svhn(root: Path, *, download: bool = False, extra: bool = False) -> Dataset:
    """SVHN (Netzer 2011): 73,257 + 26,032 colour 32x32 house numbers, 10 classes, in root/SVHN or root.

    Files train_32x32.mat, test_32x32.mat and, with extra, extra_32x32.mat: 531,131 more for training.
    """
    ready("svhn", root, download)
    train = _svhn_part(root, "train", "svhn")
    if extra:
        ready("svhn_extra", root, download)
        more = _svhn_part(root, "extra", "svhn_extra")
        train = np.concatenate([train[0], more[0]]), torch.cat([train[1], more[1]])
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)  # of the training images, per channel
    return pictures(train, _svhn_part(root, "test", "svhn"), 10, mean, std, 3)


def _svhn_part(root: Path, part: str, listed: str) -> Part:
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
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} cannot be read: {reason}; delete it, and {remedy}") from error
    _check_labels(f"{path} holds", y, 1, 10, f"10 is the digit 0; {remedy}")
    return x.transpose(3, 2, 0, 1), torch.from_numpy(y % 10)


def stl10(root: Path, *, download: bool = False) -> Dataset:
    """STL-10 (Coates 2011): 5,000 + 8,000 colour 96x96 images, 10 classes, in root/stl10_binary.

    Normalised with mean .5, deviation .5 (FedUV). Its 100,000 images without labels are not read.
    """
    ready("stl10", root, download)
    return pictures(_stl10_part(root, "train"), _stl10_part(root, "test"), 10, (0.5,), (0.5,), 3)


def _stl10_part(root: Path, part: str) -> Part:
    remedy = advice("stl10", root)
    x_at, y_at = (find(root, (f"stl10_binary/{part}_{kind}.bin",), "stl10", remedy) for kind in "Xy")
    try:
        x, y = np.fromfile(x_at, np.uint8), np.fromfile(y_at, np.uint8).astype(np.int64)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; {remedy}") from error
    size = 3 * STL10_SIDE**2
    if not len(y) or len(x) != size * len(y):
        raise UserError(
            f"{x_at} holds {len(x):,} bytes, {y_at.name} {len(y)} labels; {size:,} bytes an image are needed; {remedy}"
        )
    _check_labels(f"{y_at} holds", y, 1, 10, remedy)
    images = x.reshape(-1, 3, STL10_SIDE, STL10_SIDE).transpose(0, 1, 3, 2)  # they lie column by column
    return images, torch.from_numpy(y - 1)


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
    row = MEDMNIST[set]
    if channels is not None and channels < row.channels:
        raise UserError(f"medmnist: data.channels=1, but {set} is in colour; leave it out")
    listed = medmnist_file(set, size)
    ready(listed, root, download)
    remedy = advice(listed, root)
    at = find(root, (f"medmnist/{listed}.npz", f"{listed}.npz"), f"medmnist {set}", remedy)
    several = set == "chestmnist"
    parts = _medmnist_parts(at, ("train", "val", "test") if val == "join" else ("train", "test"), remedy)
    for name, (x, labels) in parts.items():
        if x.shape[1:] != (row.channels, size, size):
            said = f"{name}_images is {x.shape[1:]} an image; {set} has {(row.channels, size, size)}"
            raise UserError(f"{at}: {said}; {remedy}")
        if labels.shape[1:] != ((row.classes,) if several else (1,)):
            raise UserError(f"{at}: {name}_labels is {labels.shape[1:]} an image; {remedy}")
        _check_labels(f"{at}: {name}_labels holds", labels, 0, 1 if several else row.classes - 1, remedy)

    def joined(*names: str) -> Part:
        found = [parts[name] for name in names if name in parts]
        x, labels = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        return x, torch.from_numpy(labels.astype(np.float32) if several else labels[:, 0].astype(np.int64))

    return pictures(joined("train", "val"), joined("test"), row.classes, (0.5,), (0.5,), channels or row.channels)


def _medmnist_parts(at: Path, parts: Sequence[str], remedy: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """part -> images (n, C, H, W) uint8 and labels (n, m) of whole numbers."""
    found = {}
    try:
        with np.load(at, allow_pickle=False) as arrays:
            for part in parts:
                x, y = arrays[f"{part}_images"], arrays[f"{part}_labels"]
                is_image = x.dtype == np.uint8 and x.ndim in (3, 4)
                if not is_image or y.dtype.kind not in "iu" or y.ndim != 2 or len(y) != len(x):
                    raise ValueError(f"{part}: images {x.dtype} {x.shape}, labels {y.dtype} {y.shape}")
                found[part] = channels_first(x, "NHWC"[: x.ndim]), y
    except Exception as error:  # zip, zlib, numpy's header: what a damaged file makes of them is not to be foreseen
        raise UserError(f"{at} is no file of MedMNIST: {error}; delete it, and {remedy}") from error
    return found
