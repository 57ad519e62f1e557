"""Public image data sets stored as arrays: MNIST, Fashion-MNIST, EMNIST, CIFAR, SVHN, STL-10 and MedMNIST."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.download.catalogue import CATALOGUE, MEDMNIST, medmnist_file
from fedmpi.data.download.fetch import fetch_or_advise
from fedmpi.data.lazy_images import make_lazy_images
from fedmpi.data.sources.arrays import to_channels_first
from fedmpi.data.sources.images.image_preprocessing import preparation_for_arrays
from fedmpi.data.sources.source_utils import find_file
from fedmpi.data.transforms.color import NORMALISATION_CONSTANTS as PIXEL_STATISTICS

EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
STL10_PIXELS = 96  # pixels
ImagePart = tuple[np.ndarray, torch.Tensor]  # images (n, C, H, W) uint8 and labels (n,) int64

if TYPE_CHECKING:
    from typing import TypeAlias

    Split: TypeAlias = str
    MedMNISTName: TypeAlias = str
else:
    Split, MedMNISTName = Literal[tuple(EMNIST_CLASSES)], Literal[tuple(MEDMNIST)]


def _find_files(name: str, root: Path, download: bool, only: str = "") -> tuple[list[Path], str]:
    """Return the files of a data set and, for error messages, the remedy for a missing or damaged file.

    Args:
        name: the data set's name in the catalogue.
        root: the folder `data.root`.
        download: whether missing files are downloaded.
        only: return only files whose path contains this string.
    """
    remedy = fetch_or_advise(name, root, download)
    parts = [part for part in CATALOGUE[name].parts if only in part.paths[0]]
    return [find_file(root, part.paths, name, remedy) for part in parts], remedy


@contextmanager
def _convert_read_errors(path: Path, remedy: str) -> Iterator[None]:
    """Context manager: convert any error raised while a file is read to a UserError with its path and the remedy."""
    try:
        yield
    except Exception as error:
        how = remedy.removeprefix("correct data.root, ").removeprefix("correct data.root; ")
        raise UserError(f"{path} cannot be read: {error}; delete the file, and download it again: {how}") from error


def _check_labels(labels: np.ndarray, low: int, high: int) -> None:
    """Raise ValueError if a label is outside low..high. labels: (n,), or (n, m) for m labels per image."""
    wrong = (labels < low) | (labels > high)
    if wrong.any():
        row = int(wrong.reshape(len(wrong), -1).any(1).argmax())
        raise ValueError(f"it contains the label {labels[wrong][0]} in row {row}; labels must be from {low} to {high}")


def image_dataset(
    train: ImagePart, test: ImagePart, classes: int, mean: Sequence[float], std: Sequence[float], channels: int
) -> Dataset:
    """Return a data set of images that are normalised when a batch is read.

    Args:
        train, test: the images, (n, C, H, W) uint8, and the labels of each part.
        mean, std: the values with which pixels in 0..1 are normalised, one number or one per channel.
        channels: the number of channels of the inputs; a single stored channel is repeated.
    """
    (x, y), (test_x, test_y) = train, test
    samples, test_samples = (make_lazy_images(images, mean, std, channels) for images in (x, test_x))
    return Dataset(
        samples, y, test_samples, test_y, classes, preparation=preparation_for_arrays(x, mean, std, channels)
    )


# ---- MNIST, Fashion-MNIST, EMNIST ----
def mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """MNIST (LeCun 1998): 60,000 + 10,000 grey 28x28 images of digits, 10 classes, in root/MNIST/raw.

    Normalised with mean .1307, standard deviation .3081.

    channels: 3 repeats the grey channel, for models that need colour images.
    """
    train, test = _read_idx_parts(*_find_files("mnist", root, download), classes=10)
    return image_dataset(train, test, 10, *PIXEL_STATISTICS["mnist"], channels)


def fashion_mnist(root: Path, *, download: bool = False, channels: Literal[1, 3] = 1) -> Dataset:
    """Fashion-MNIST (Xiao 2017): 60,000 + 10,000 grey 28x28 images of clothing, 10 classes, in root/FashionMNIST/raw.

    Normalised with mean .2860, standard deviation .3530 (of the training images).

    channels: 3 repeats the grey channel, for models that need colour images.
    """
    train, test = _read_idx_parts(*_find_files("fashion_mnist", root, download), classes=10)
    return image_dataset(train, test, 10, *PIXEL_STATISTICS["fashion_mnist"], channels)


def emnist(root: Path, *, download: bool = False, split: Split = "balanced", channels: Literal[1, 3] = 1) -> Dataset:
    """EMNIST (Cohen 2017): grey 28x28 images of letters and digits, in root/EMNIST/raw, gzipped or not.

    The images are stored transposed, and are transposed back. The classes of letters are numbered from 0. Normalised
    with mean .1307, standard deviation .3081, like MNIST.

    split: the version of the data set: byclass (814,255 images, 62 classes), bymerge (814,255, 47), balanced (131,600,
    47), letters (145,600, 26), digits (280,000, 10), mnist (70,000, 10).
    channels: 3 repeats the grey channel, for models that need colour images.
    """
    classes, first_label = EMNIST_CLASSES[split], 1 if split == "letters" else 0  # in the files of letters, a is 1
    parts = _read_idx_parts(*_find_files("emnist", root, download, f"emnist-{split}-"), classes, first_label)
    train, test = ((images.transpose(0, 1, 3, 2), labels) for images, labels in parts)
    return image_dataset(train, test, classes, *PIXEL_STATISTICS["mnist"], channels)


def _read_idx_parts(files: list[Path], remedy: str, classes: int, first_label: int = 0) -> list[ImagePart]:
    """Read the training and the test part from their idx files. first_label: the label of class 0 in the files."""
    parts = []
    for images_at, labels_at in (files[:2], files[2:]):
        with _convert_read_errors(images_at, remedy):
            images = read_idx(images_at, 3)
        with _convert_read_errors(labels_at, remedy):
            labels = read_idx(labels_at, 1)
            if len(images) != len(labels):
                raise ValueError(f"it contains {len(labels)} labels for {len(images)} images")
            _check_labels(labels, first_label, classes - 1 + first_label)
        parts.append((images[:, None], torch.from_numpy(labels.astype(np.int64) - first_label)))
    return parts


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an idx file, gzipped or not, as a uint8 array of `ndim` dimensions.

    The header is big-endian: 0x0000, type (0x08 = unsigned byte), number of dimensions, one uint32 per dimension; the
    data follow. The file is decompressed in memory, because its folder may be read-only. torchvision is not used,
    because it cannot read gzipped files, and its import takes one second on each rank.

    Raises:
        ValueError: the content contradicts the header.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if data[:4] != bytes((0, 0, 8, ndim)):
        raise ValueError(f"it is not an idx file of unsigned bytes with {ndim} dimensions")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", ndim, offset=4))
    content = len(data) - 4 - 4 * ndim
    if not content or content != math.prod(shape):  # numpy's product would wrap around at 2^64
        raise ValueError(f"its header announces {' x '.join(map(str, shape))} bytes, but {content} follow")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy()  # a view would be read-only


# ---- CIFAR, SVHN, STL-10 ----
def cifar10(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 10 classes, in root/cifar-10-batches-py.

    The files are pickles; torchvision opens them after verifying their checksums.
    """
    return _read_cifar("cifar10", 10, root, download)


def cifar100(root: Path, *, download: bool = False) -> Dataset:
    """CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour 32x32 images, 100 classes, in root/cifar-100-python.

    The files are pickles; torchvision opens them after verifying their checksums.
    """
    return _read_cifar("cifar100", 100, root, download)


def _read_cifar(name: str, classes: int, root: Path, download: bool) -> Dataset:
    """Read CIFAR-10 or CIFAR-100 with torchvision."""
    from fedmpi.common.torchvision_compat import torchvision

    remedy = fetch_or_advise(name, root, download)
    kind = getattr(torchvision.datasets, name.upper())
    try:
        train, test = (kind(root, train=train) for train in (True, False))
    except (OSError, RuntimeError) as error:
        folder = root / kind.base_folder
        wrong = UserError if folder.exists() else MissingDataError
        problem = f"cannot be read: {error}"
        if "not found or corrupted" in str(error):  # torchvision would advise download=True
            problem = "lacks files, or their checksums are wrong" if folder.exists() else "not found"
        reason = f"folder {folder} {problem} (data.root = {root})"
        raise wrong(f"{name}: {reason}; {remedy}") from error
    x, test_x = (part.data.transpose(0, 3, 1, 2) for part in (train, test))
    return image_dataset(
        (x, torch.tensor(train.targets)), (test_x, torch.tensor(test.targets)), classes, *PIXEL_STATISTICS[name], 3
    )


def svhn(root: Path, *, download: bool = False) -> Dataset:
    """SVHN (Netzer 2011): 73,257 + 26,032 colour 32x32 house numbers, 10 classes, in root/SVHN or root.

    The files are train_32x32.mat and test_32x32.mat.
    """
    from scipy import io  # imported here, because the import sets an environment variable

    files, remedy = _find_files("svhn", root, download)
    parts = []
    for path in files:
        with _convert_read_errors(path, remedy):
            content = io.loadmat(path, variable_names=("X", "y"))
            x, y = content["X"], content["y"].astype(np.int64).ravel()
            if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)):
                raise ValueError(
                    f"X is {x.dtype} of shape {x.shape} for {len(y)} labels; must be uint8 of shape (32, 32, 3, n)"
                )
            _check_labels(y, 1, 10)
        parts.append((x.transpose(3, 2, 0, 1), torch.from_numpy(y % 10)))  # label 10 is the digit 0
    train, test = parts
    return image_dataset(train, test, 10, *PIXEL_STATISTICS["svhn"], 3)


def stl10(root: Path, *, download: bool = False) -> Dataset:
    """STL-10 (Coates 2011): 5,000 + 8,000 colour 96x96 images, 10 classes, in root/stl10_binary.

    Normalised with mean .5, standard deviation .5 (FedUV). The 100,000 images without labels are not read.
    """
    files, remedy = _find_files("stl10", root, download)
    parts = []
    for x_at, y_at in (files[:2], files[2:]):
        with _convert_read_errors(x_at, remedy):
            x, y = np.fromfile(x_at, np.uint8), np.fromfile(y_at, np.uint8).astype(np.int64)
            size = 3 * STL10_PIXELS**2
            if len(x) != size * len(y):
                raise ValueError(f"it contains {len(x):,} bytes for {len(y)} labels; must be {size:,} bytes per image")
            _check_labels(y, 1, 10)
        images = x.reshape(-1, 3, STL10_PIXELS, STL10_PIXELS).transpose(0, 1, 3, 2)  # stored column by column
        parts.append((images, torch.from_numpy(y - 1)))
    train, test = parts
    return image_dataset(train, test, 10, *PIXEL_STATISTICS["half"], 3)


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
    """MedMNIST v2 (Yang 2023): twelve data sets of medical 28x28 images, in root/medmnist/SET.npz or root/SET.npz.

    Normalised with mean .5, standard deviation .5. chestmnist has 14 labels per image, each 0 or 1 (task multi_label).
    The five grades of retinamnist are classes.

    set: the name of the data set, such as pathmnist.
    size: width and height of the images; for 64, 128 and 224 the files of MedMNIST+ are read, such as SET_64.npz.
    channels: 3 repeats a grey channel; by default the number of channels of the data set.
    val: what happens to the validation part: join adds it to the training part, as in FedSOL's PathMNIST and
    TissueMNIST; leave does not read it.
    """
    row = MEDMNIST[set]
    if channels is not None and channels < row.channels:
        raise UserError(
            f"medmnist: data.channels: 1 is not allowed for data.set: {set}, which has colour images; remove "
            "data.channels"
        )
    (file,), remedy = _find_files(medmnist_file(set, size), root, download)
    labels_an_image = row.classes if set == "chestmnist" else 1
    shape, largest_label = (row.channels, size, size), 1 if labels_an_image > 1 else row.classes - 1
    with _convert_read_errors(file, remedy), np.load(file, allow_pickle=False) as arrays:

        def part(*names: str) -> ImagePart:
            images, labels = (
                np.concatenate([arrays[f"{name}_{kind}"] for name in names]) for kind in ("images", "labels")
            )
            x = to_channels_first(images, "NHWC"[: images.ndim])
            if x.dtype != np.uint8 or x.shape[1:] != shape or labels.shape != (len(x), labels_an_image):
                problem = f"images are {x.dtype} of shape {x.shape}, and labels have the shape {labels.shape}"
                raise ValueError(
                    f"{names[0]}: {problem}; {set} must have images {shape} with {labels_an_image} labels each"
                )
            _check_labels(labels, 0, largest_label)
            y = labels.astype(np.float32) if labels_an_image > 1 else labels[:, 0].astype(np.int64)
            return x, torch.from_numpy(y)

        train, test = part("train", "val") if val == "join" else part("train"), part("test")
    return image_dataset(train, test, row.classes, *PIXEL_STATISTICS["half"], channels or row.channels)
