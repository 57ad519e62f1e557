"""Silo mode: client k is the k-th site of data.silos, and each rank opens only the files of its own clients.

Ranks exchange two integer tables: the sizes and shapes of all clients (`describe_silos`) and, if the shapes agree,
their label counts (`count_local_labels`). `build_silo_federation` makes a FederatedData from both tables.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import decode_format, encode_format
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import FederatedData, Shard, count_labels
from fedmpi.data.preprocessing import make_ready_inputs

TABLE_COLUMNS = ("client", "n_train", "n_test", "format of samples and digest of names")
FORMAT_BYTES = 512  # size of the last column, which consists of int64 numbers of 8 bytes
TABLE_WIDTH = 3 + FORMAT_BYTES // 8


class SampleFormat(NamedTuple):
    """The properties of samples and targets that must be equal at all sites."""

    classes: int
    sample: str  # shape and type of a sample, as a string (common/inputs.py)
    target: str  # shape and type of a target, as a string
    names: str  # digest of `Dataset.input_and_class_names`, "" if the source does not set it
    files: str  # `Preparation.files_digest`

    def __str__(self) -> str:
        what = "a real-valued target" if self.classes == 1 else f"{self.classes} classes"
        (shape, dtype), (target, kind) = decode_format(self.sample), decode_format(self.target)
        return f"{what} and samples of shape {shape}, {dtype}, with targets of shape {target}, {kind}"


def open_silos(
    source: Callable[..., Dataset],
    root: Path,
    silos: Sequence[str],
    own_clients: Iterable[int],
    seed: int = 0,
    /,
    **options: Any,
) -> dict[int, Dataset]:
    """Read the data sets of this rank's clients; no file of another site is opened.

    Args:
        root: the folder of the data.
        silos: the names of all sites; client k is site k.
        own_clients: the clients of this rank.
        seed: the seed of the run. The global random generators, which a source may use, are seeded anew for each site.
        options: options of the source.

    Returns:
        The data set of each of these clients.

    Raises:
        UserError: a site is listed twice, or the source cannot open the files of one site alone.
    """
    if len(set(silos)) < len(silos):
        raise UserError(f"data.silos: [{', '.join(silos)}] lists a site twice; list each site once")
    if "site" not in inspect.signature(source).parameters:
        reason = f"the data source {source.__name__} cannot open a single site (it has no parameter `site`)"
        raise UserError(f"data.silos: {reason}; remove data.silos, and divide the data with data.partition")
    opened = {}
    for k in sorted(own_clients):
        with seeds.temporary_seed(seed, "source", silos[k]):
            opened[k] = source(root, site=silos[k], **options)
    return opened


def describe_silos(datasets: Mapping[int, Dataset]) -> np.ndarray:
    """Return a table that describes the data sets of this rank's clients, one client per row.

    Returns:
        A table (clients, TABLE_WIDTH) int64 with the columns TABLE_COLUMNS. The last column is a SampleFormat as JSON,
        padded with blanks to FORMAT_BYTES bytes.
    """
    rows = []
    for k, data in sorted(datasets.items()):
        sample = encode_format(data.input_shape, data.train_x.dtype)
        target = encode_format(tuple(data.train_y.shape[1:]), data.train_y.dtype)
        names = (
            hashlib.sha256("\0".join(data.input_and_class_names).encode()).hexdigest()[:16]
            if data.input_and_class_names
            else ""
        )
        files = data.preparation.files_digest if data.preparation else ""
        text = json.dumps(SampleFormat(data.classes, sample, target, names, files)).encode()
        if len(text) > FORMAT_BYTES:
            problem = f"the description of a sample of client {k} has {len(text)} bytes, but at most {FORMAT_BYTES} are"
            raise UserError(f"data.silos: {problem} allowed: {text.decode()}; use fewer tensors, or shorter names")
        numbers = np.frombuffer(text.ljust(FORMAT_BYTES), dtype="<i8")
        rows.append((k, len(data.train_y), len(data.test_y), *numbers.tolist()))
    return np.array(rows, dtype=np.int64).reshape(-1, TABLE_WIDTH)


def count_local_labels(datasets: Mapping[int, Dataset], table: np.ndarray, silos: Sequence[str]) -> np.ndarray:
    """Count the labels of this rank's clients; return counts (N, classes) int64, with zeros for other clients.

    The sum of the results over all ranks contains the counts of all clients.

    Args:
        datasets: the data sets of this rank's clients.
        table: the rows that `describe_silos` returned on all ranks, in any order.
        silos: the names of all sites.

    Raises:
        UserError: the formats of the sites differ; the error is raised on every rank.
    """
    _, common = _check_formats(table, silos)
    counts = np.zeros((len(silos), common.classes), dtype=np.int64)
    for k, data in datasets.items():
        counts[k] = count_labels(data.train_y, data.classes)
    return counts


def build_silo_federation(
    datasets: Mapping[int, Dataset], table: np.ndarray, label_counts: np.ndarray, silos: Sequence[str]
) -> FederatedData:
    """Build the FederatedData of this rank: the samples of its own clients, and the sample counts of all clients.

    Args:
        datasets: the data sets of this rank's clients.
        table: the rows that `describe_silos` returned on all ranks, in any order.
        label_counts: the sum of `count_local_labels` over all ranks.
        silos: the names of all sites.
    """
    table, common = _check_formats(table, silos)
    (shape, dtype), (target_shape, target_dtype) = decode_format(common.sample), decode_format(common.target)
    assert isinstance(target_shape, tuple)
    assert isinstance(target_dtype, torch.dtype)
    return FederatedData(
        classes=common.classes,
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
        files_digest=common.files,
        silo_preparations={
            k: d.preparation or make_ready_inputs(d.input_shape, d.train_x.dtype) for k, d in datasets.items()
        },
        group={k: d.group for k, d in datasets.items() if d.group is not None},
    )


def _check_formats(table: np.ndarray, silos: Sequence[str]) -> tuple[np.ndarray, SampleFormat]:
    """Return the table sorted by client, and the format that all sites have in common.

    Raises UserError unless each client is opened by exactly one rank and all sites have the same format.
    """
    table = table[np.argsort(table[:, 0], kind="stable")]
    opened = table[:, 0].tolist()
    if opened != list(range(len(silos))):
        needed = f"each of 0..{len(silos) - 1} must be opened by exactly one rank"
        raise UserError(f"data.silos: the ranks opened the clients {opened}, but {needed}")
    formats = [SampleFormat(*json.loads(row.astype("<i8").tobytes())) for row in table[:, 3:]]
    for name, other in zip(silos, formats, strict=True):
        if other.files != formats[0].files:
            raise UserError(
                f"data.silos: the files of the tokenizer (data.tokenizer) differ between {silos[0]} and {name}; copy "
                "the same folder to all sites"
            )
        if other[:3] != formats[0][:3]:
            raise UserError(
                f"data.silos: {silos[0]} has {formats[0]}, but {name} has {other}; all sites must agree (set options "
                "of "
                "the data source, such as `classes`, for properties that a single site cannot know)"
            )
        if other.names != formats[0].names:
            raise UserError(
                f"data.silos: the columns or classes of {silos[0]} and {name} have different names, or are in a "
                "different order; "
                "set the names in the config (data.features, data.categorical, data.class_names or data.alphabet, "
                "depending "
                "on the data source)"
            )
    return table, formats[0]
