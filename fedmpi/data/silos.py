"""Silo mode: client k is site k of a list, and a rank opens the files of its own clients only.

The ranks share what all must know about all clients in two integer tables: sizes and shapes (`describe`), then, once
those agree, label counts (`label_table`). `silo_federation` makes the Federated from both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Federated, Shard, count_labels

MAX_DIMS = 8
COLUMNS = ("client", "n_train", "n_test", "classes", "ndim", *tuple(f"dim{i}" for i in range(MAX_DIMS)))


def open_silos(
    source: Callable[..., Dataset], root: Path, silos: Sequence[str], mine: Iterable[int], **options: Any
) -> dict[int, Dataset]:
    """client -> its data set, for the clients `mine`; nothing of the other silos is opened or looked for."""
    if len(set(silos)) < len(silos):
        raise UserError(f"data.silos names a site twice: {list(silos)}; one site is one client")
    if "site" not in inspect.signature(source).parameters:
        raise UserError(
            f"data.silos: the source {source.__name__} cannot open a single site (it has no `site` parameter); "
            f"leave `silos` out and divide it with data.partition"
        )
    return {k: source(root, site=silos[k], **options) for k in sorted(mine)}


def describe(datasets: Mapping[int, Dataset]) -> np.ndarray:
    """(clients of this rank, 13) int64, columns COLUMNS; the shape of a sample is padded with zeros."""
    rows = []
    for k, data in sorted(datasets.items()):
        shape = data.input_shape
        if len(shape) > MAX_DIMS:
            raise UserError(
                f"data.silos: a sample of client {k} has {len(shape)} dimensions; at most {MAX_DIMS} are allowed"
            )
        padding = (0,) * (MAX_DIMS - len(shape))
        rows.append((k, len(data.train_y), len(data.test_y), data.classes, len(shape), *shape, *padding))
    return np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))


def label_table(datasets: Mapping[int, Dataset], table: np.ndarray, silos: Sequence[str]) -> np.ndarray:
    """(N, classes) int64 with the rows of this rank's clients, zeros elsewhere: the sum over ranks is the whole table.

    table: all ranks' `describe` rows, in any order. Raises UserError, on every rank alike, if the sites do not fit
    together.
    """
    table = _agreed(table, silos)
    counts = np.zeros((len(silos), int(table[0, 3])), dtype=np.int64)
    for k, data in datasets.items():
        counts[k] = count_labels(data.train_y, data.classes)
    return counts


def silo_federation(
    datasets: Mapping[int, Dataset], table: np.ndarray, label_counts: np.ndarray, silos: Sequence[str]
) -> Federated:
    """This rank's view. table: all `describe` rows; label_counts: the sum of all `label_table`s."""
    table = _agreed(table, silos)
    ndim = int(table[0, 4])
    return Federated(
        classes=int(table[0, 3]),
        input_shape=tuple(int(size) for size in table[0, 5 : 5 + ndim]),
        clients=len(silos),
        train_sizes=table[:, 1].copy(),
        test_sizes=table[:, 2].copy(),
        label_counts=label_counts,
        train={k: Shard(d.train_x, d.train_y, torch.arange(len(d.train_y))) for k, d in datasets.items()},
        test={k: Shard(d.test_x, d.test_y, torch.arange(len(d.test_y))) for k, d in datasets.items()},
        global_test=None,
        parts=None,
        site_names=tuple(silos),
    )


def _agreed(table: np.ndarray, silos: Sequence[str]) -> np.ndarray:
    """The rows by client; UserError unless each client is there once and all agree in classes and shape."""
    table = table[np.argsort(table[:, 0], kind="stable")]
    if table[:, 0].tolist() != list(range(len(silos))):
        raise UserError(
            f"data.silos: the ranks opened clients {table[:, 0].tolist()}; each of 0..{len(silos) - 1} must be "
            "opened once"
        )
    for row in table[1:]:
        if not np.array_equal(row[3:], table[0, 3:]):
            raise UserError(
                f"data.silos: {silos[0]} has {_look(table[0])}, {silos[row[0]]} has {_look(row)}; all sites must agree "
                f"(an option of the source, such as `classes`, may say what a site cannot know alone)"
            )
    return table


def _look(row: np.ndarray) -> str:
    target = "a real-valued target" if row[3] == 1 else f"{row[3]} classes"
    return f"{target} and samples of shape {tuple(row[5 : 5 + row[4]].tolist())}"
