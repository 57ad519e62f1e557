"""Number the clients of files that hold samples by client, and hold images as bytes where that loses nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedmpi.common.text import brief, count
from fedmpi.data.dataset import Dataset

NOBODY = -1  # the site of test rows whose client has no training rows


def image_bytes(x: np.ndarray) -> np.ndarray | None:
    """The uint8 array of which `x` is v / 255 to the last bit of float32; None if there is none.

    Images are kept as bytes and divided by 255 when a batch is read, which gives the same numbers from a quarter of the
    memory.
    """
    if x.dtype == np.uint8:
        return x
    with np.errstate(over="ignore"):
        values = np.rint(x * 255)
    if not ((values >= 0) & (values <= 255)).all():
        return None
    found = values.astype(np.uint8)
    return found if np.array_equal(as_floats(found), x.astype(np.float32)) else None


def as_floats(x: np.ndarray) -> np.ndarray:
    """float32; v / 255 of bytes."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)


def with_sites(
    data: Dataset, names: Sequence[str], train_rows: Sequence[int], test_rows: Sequence[int], shared_test: bool = False
) -> Dataset:
    """The data set with its clients as sites; its rows must be in the order of `names`.

    A client without training rows is no site: its test rows belong to the global test set alone.

    Args:
        names: all clients, in the order of their numbers.
        train_rows, test_rows: how many rows each has.
        shared_test: the test part belongs to no client, whatever the names in it.
    """
    trained = [k for k, rows in enumerate(train_rows) if rows]
    number = np.full(len(names), NOBODY)
    number[trained] = np.arange(len(trained))
    owner = np.repeat(number, test_rows)
    untrained = [name for name, a, b in zip(names, train_rows, test_rows, strict=True) if b and not a]
    if untrained and not shared_test and len(untrained) < np.count_nonzero(test_rows):
        who = f"{count(len(untrained), 'client')} with test rows but no training row ({brief(', '.join(untrained))})"
        warnings.warn(f"data: {who}: these rows are part of the global test set alone", stacklevel=4)
    untested = [names[k] for k in trained if not test_rows[k]]
    common = shared_test or bool((owner == NOBODY).all())
    if untested and not common:
        warnings.warn(
            f"data: {count(len(untested), 'client')} without a test row ({brief(', '.join(untested))})", stacklevel=4
        )
    return replace(
        data,
        site=torch.from_numpy(np.repeat(number, train_rows)),
        test_site=None if common else torch.from_numpy(owner),
        site_names=tuple(names[k] for k in trained),
    )
