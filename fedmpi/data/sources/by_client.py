"""Number the clients of files that hold samples by client, and hold images as bytes where that loses nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedmpi.common.text import count, shorten
from fedmpi.data.dataset import Dataset

NOBODY = -1  # the site of test rows whose client has no training rows


def image_bytes(x: np.ndarray) -> np.ndarray | None:
    """Return the uint8 array of which `x` is v / 255 to the last bit of float32, in a quarter of the memory; else None.

    Images that are kept as bytes are divided by 255 when a batch is read.
    """
    if x.dtype == np.uint8:
        return x
    with np.errstate(over="ignore"):
        values = np.rint(x * 255)
    if not ((values >= 0) & (values <= 255)).all():
        return None
    stored = values.astype(np.uint8)
    return stored if np.array_equal(as_floats(stored), x.astype(np.float32)) else None


def as_floats(x: np.ndarray) -> np.ndarray:
    """float32; v / 255 of bytes."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)


def with_sites(
    data: Dataset, names: Sequence[str], owner: np.ndarray, test_owner: np.ndarray, shared_test: bool = False
) -> Dataset:
    """Return the data set with its clients as sites.

    A client without training rows is no site: its test rows are part of the global test set alone.

    Args:
        names: all clients.
        owner, test_owner: the client of each training row and of each test row, a number in `names`.
        shared_test: the test part belongs to no client, whatever test_owner says.
    """
    trained, tested = np.unique(owner), np.unique(test_owner)
    number = np.full(len(names), NOBODY)
    number[trained] = np.arange(len(trained))
    has_own_tests = len(np.intersect1d(trained, tested)) > 0 and not shared_test
    unusual = {
        "with test rows alone, which are part of the global test set only": np.setdiff1d(tested, trained),
        "without a test row": np.setdiff1d(trained, tested),
    }
    for what, clients in unusual.items() if has_own_tests else ():
        if len(clients):
            who = shorten(", ".join(names[k] for k in clients))
            warnings.warn(f"data: {count(len(clients), 'client')} {what}: {who}", stacklevel=4)
    return replace(
        data,
        site=torch.from_numpy(number[owner]),
        test_site=torch.from_numpy(number[test_owner]) if has_own_tests else None,
        site_names=tuple(names[k] for k in trained),
    )
