"""Silo mode: client k is site k of a list, and a rank opens the files of its own clients only.

The ranks share what all must know about all clients in two integer tables: sizes and shapes (`describe`), then, once
those agree, label counts (`label_table`). `silo_federation` makes the Federated from both.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, from_text, to_text
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Federated, Shard, count_labels
from fedmpi.data.preparation import ready

COLUMNS = ("client", "n_train", "n_test", "classes", "digest of names", "shapes and types of a sample and its target")
CLASSES, DIGEST = 3, 4
NUMBERS, TEXT = 5, 512  # columns that are numbers; bytes of the text behind them, 8 a column
WIDTH = NUMBERS + TEXT // 8


def open_silos(
    source: Callable[..., Dataset],
    root: Path,
    silos: Sequence[str],
    mine: Iterable[int],
    seed: int = 0,
    /,
    **options: Any,
) -> dict[int, Dataset]:
    """client -> its data set, for the clients `mine`; nothing of the other silos is opened or looked for.

    seed: of what a source draws from global generators, for each site anew.
    """
    if len(set(silos)) < len(silos):
        raise UserError(f"data.silos names a site twice: {list(silos)}; one site is one client")
    if "site" not in inspect.signature(source).parameters:
        reason = f"the source {source.__name__} cannot open a single site (it has no `site` parameter)"
        raise UserError(f"data.silos: {reason}; leave `silos` out and divide it with data.partition")
    opened = {}
    for k in sorted(mine):
        with seeds.seeded(seed, "source", silos[k]):
            opened[k] = source(root, site=silos[k], **options)
    return opened


def describe(datasets: Mapping[int, Dataset]) -> np.ndarray:
    """(clients of this rank, WIDTH) int64: columns COLUMNS, the last of which is JSON, padded with blanks.

    The digest is of `Dataset.meaning`, 0 where the source does not tell it.
    """
    rows = []
    for k, data in sorted(datasets.items()):
        y = data.train_y
        parts = (to_text(data.input_shape, data.train_x.dtype), to_text(tuple(y.shape[1:]), y.dtype))
        text = f"[{','.join(parts)}]".encode()
        if len(text) > TEXT:
            what = f"what a sample of client {k} looks like takes {len(text)} characters, of which {TEXT} are allowed"
            raise UserError(f"data.silos: {what}: {text.decode()}; use fewer tensors, or shorter names")
        words = np.frombuffer(text.ljust(TEXT), dtype="<i8")
        names = hashlib.sha256("\0".join(data.meaning).encode()).digest()[:8]
        digest = int.from_bytes(names, "big") >> 1 if data.meaning else 0
        rows.append((k, len(y), len(data.test_y), data.classes, digest, *words.tolist()))
    return np.array(rows, dtype=np.int64).reshape(-1, WIDTH)


def label_table(datasets: Mapping[int, Dataset], table: np.ndarray, silos: Sequence[str]) -> np.ndarray:
    """(N, classes) int64 with the rows of this rank's clients, zeros elsewhere: the sum over ranks is the whole table.

    table: all ranks' `describe` rows, in any order. Raises UserError, on every rank alike, if the sites do not fit
    together.
    """
    table = _agreed(table, silos)
    counts = np.zeros((len(silos), int(table[0, CLASSES])), dtype=np.int64)
    for k, data in datasets.items():
        counts[k] = count_labels(data.train_y, data.classes)
    return counts


def silo_federation(
    datasets: Mapping[int, Dataset], table: np.ndarray, label_counts: np.ndarray, silos: Sequence[str]
) -> Federated:
    """This rank's view. table: all `describe` rows; label_counts: the sum of all `label_table`s."""
    table = _agreed(table, silos)
    (shape, dtype), (target_shape, target_dtype) = _sample_and_target(table[0])
    assert isinstance(target_shape, tuple)
    assert isinstance(target_dtype, torch.dtype)
    return Federated(
        classes=int(table[0, CLASSES]),
        input_shape=shape,
        x_dtype=dtype,
        target_shape=target_shape,
        target_dtype=target_dtype,
        clients=len(silos),
        train_sizes=table[:, 1].copy(),
        test_sizes=table[:, 2].copy(),
        label_counts=label_counts,
        train={k: Shard(d.train_x, d.train_y, torch.arange(len(d.train_y))) for k, d in datasets.items()},
        test={k: Shard(d.test_x, d.test_y, torch.arange(len(d.test_y))) for k, d in datasets.items()},
        global_test=None,
        parts=None,
        site_names=tuple(silos),
        own_preparation={k: d.preparation or ready(d.input_shape, d.train_x.dtype) for k, d in datasets.items()},
        group={k: d.group for k, d in datasets.items() if d.group is not None},
    )


def _agreed(table: np.ndarray, silos: Sequence[str]) -> np.ndarray:
    """The rows by client; UserError unless each client is there once and all agree in classes, shapes and types."""
    table = table[np.argsort(table[:, 0], kind="stable")]
    opened = table[:, 0].tolist()
    if opened != list(range(len(silos))):
        needed = f"each of 0..{len(silos) - 1} must be opened once"
        raise UserError(f"data.silos: the ranks opened clients {opened}; {needed}")
    for row in table[1:]:
        one, other = silos[0], silos[row[0]]
        if row[CLASSES] != table[0, CLASSES] or not np.array_equal(row[NUMBERS:], table[0, NUMBERS:]):
            raise UserError(
                f"data.silos: {one} has {_describe(table[0])}, {other} has {_describe(row)}; all sites must agree "
                "(an option of the source, such as `classes`, may say what a site cannot know alone)"
            )
        if row[DIGEST] != table[0, DIGEST]:
            raise UserError(
                f"data.silos: {one} and {other} have as many columns and classes, but other names, or another order; "
                "name them in the config (data.features, data.categorical, data.class_names, data.alphabet: what the "
                "source has of these)"
            )
    return table


def _sample_and_target(row: np.ndarray) -> list[tuple[Shape, Type]]:
    """Shape and type of a sample, and of its target."""
    text = np.ascontiguousarray(row[NUMBERS:]).astype("<i8").tobytes().decode()
    return [from_text(json.dumps(part)) for part in json.loads(text)]


def _describe(row: np.ndarray) -> str:
    (shape, dtype), (target, kind) = _sample_and_target(row)
    what = "a real-valued target" if row[CLASSES] == 1 else f"{row[CLASSES]} classes"
    return f"{what} and samples of shape {shape}, {dtype}, with targets of shape {target}, {kind}"
