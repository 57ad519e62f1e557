"""A balanced PneumoniaMNIST: as many pictures of either class for training, for the even split of an even alpha.

    python benchmarks/balanced.py DATA/medmnist/pneumoniamnist.npz DATA/pneumonia_balanced.npz

Of 4,708 + 524 pictures for training 1,349 are normal: all of them, and the first 1,349 of pneumonia. Where each of five
clients draws its own shares of the classes (`convention: client`), the rarer class of the whole set is gone after three
clients and two have one class only, whatever alpha is. The test part stays as it is: 234 normal, 390 pneumonia.
"""

import sys
from pathlib import Path

import numpy as np


def balanced(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first n of each class, n samples of the rarest, in their order."""
    rows = [np.flatnonzero(y == label) for label in np.unique(y)]
    kept = np.sort(np.concatenate([each[: min(map(len, rows))] for each in rows]))
    return x[kept], y[kept]


def main() -> None:
    source, to = map(Path, sys.argv[1:])
    with np.load(source) as z:
        x, y = (np.concatenate([z[f"train_{part}"], z[f"val_{part}"]]) for part in ("images", "labels"))
        x, y = balanced(x, y.ravel())
        np.savez(to, x_train=x, y_train=y, x_test=z["test_images"], y_test=z["test_labels"].ravel())
    print(f"{to}: {len(y)} for training, {' + '.join(map(str, np.bincount(y)))}")


if __name__ == "__main__":
    main()
