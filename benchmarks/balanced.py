"""Write a balanced PneumoniaMNIST, with the same number of training images of both classes.

    python benchmarks/balanced.py DATA/medmnist/pneumoniamnist.npz DATA/pneumonia_balanced.npz

The training set contains the 1,349 normal images of the 4,708 + 524 images for training, and the first 1,349 images of
pneumonia. In the full set, if each of five clients draws its own class proportions (`convention: client`), the rarer
class is used up after three clients, and two clients have a single class, for any alpha. The test set is not changed:
234 normal, 390 pneumonia.
"""

import sys
from pathlib import Path

import numpy as np


def balance_classes(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first n samples of each class in their order, for the number n of samples of the rarest class."""
    rows = [np.flatnonzero(y == label) for label in np.unique(y)]
    stored = np.sort(np.concatenate([each[: min(map(len, rows))] for each in rows]))
    return x[stored], y[stored]


def main() -> None:
    """Run the benchmark with the arguments of the command line."""
    source, to = map(Path, sys.argv[1:])
    with np.load(source) as z:
        x, y = (np.concatenate([z[f"train_{part}"], z[f"val_{part}"]]) for part in ("images", "labels"))
        x, y = balance_classes(x, y.ravel())
        np.savez(to, x_train=x, y_train=y, x_test=z["test_images"], y_test=z["test_labels"].ravel())
    print(f"{to}: {len(y)} for training, {' + '.join(map(str, np.bincount(y)))}")


if __name__ == "__main__":
    main()
