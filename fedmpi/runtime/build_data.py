"""Settings -> the federation's data, as one rank sees them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmpi.comm import Communicator
from fedmpi.common import registry
from fedmpi.common.blame import blaming
from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data import partition, sources
from fedmpi.data.federated import Federated, split
from fedmpi.data.silos import describe, label_table, open_silos, silo_federation
from fedmpi.data.validation import hold_out
from fedmpi.engine import sampling


def training_ranks(settings: Settings, size: int) -> list[int]:
    """The ranks that train: all but rank 0, which trains only if it is alone or server.trains is set."""
    return list(range(0 if size == 1 or settings.server.trains else 1, size))


def open_source(settings: Settings) -> partial[Any]:
    """The data source with its checked options; call it with data.root."""
    given = dict(settings.data.options) | ({"download": True} if settings.data.download else {})
    chosen = registry.Chosen(settings.data.source, given, settings.data.beside)
    return registry.make(sources.KIND, chosen, settings.origins("data"))


def partitioned(settings: Settings) -> Federated:
    """The federation of one partitioned data set, which every rank holds as a whole."""
    source, cut = open_source(settings), settings.data.partition
    assert cut is not None
    registry.make(partition.KIND, cut, settings.origins("data.partition"))  # before data are read, and with the line
    with _one_at_a_time(settings.data.root if settings.data.download else None), blaming("data"):
        dataset = source(settings.data.root)
    with blaming("data.partition"):
        whole = split(dataset, cut.scheme, cut.clients, settings.seed, settings.data.client_test, **cut.options)
    return hold_out(whole, settings.data.validation, settings.seed)


@contextmanager
def _one_at_a_time(root: Path | None) -> Iterator[None]:
    """Hold a lock in `root`: the first rank on a file system downloads, the others wait and then find the files.

    root None: there is no download, so no lock is needed.
    """
    if root is None:
        yield
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / ".fedmpi-download.lock").open("w")
    except OSError as error:
        raise UserError(f"data.download: {root} cannot be written to: {error.strerror}; correct data.root") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, so a killed rank blocks nobody
        yield


def siloed(settings: Settings, comm: Communicator) -> Federated:
    """The federation of silos: this rank opens its own clients' files; ranks exchange sizes and label counts."""
    source, names = open_source(settings), settings.data.silos
    assert names is not None
    owner = sampling.pinned(range(len(names)), training_ranks(settings, comm.size))
    mine = [k for k in owner if owner[k] == comm.rank]
    with blaming("data"):
        datasets = open_silos(source.func, settings.data.root, names, mine, **source.keywords)
    sizes = describe(datasets)
    table = np.zeros((len(names), sizes.shape[1] if len(sizes) else describe_width()), dtype=np.int64)
    table[mine] = sizes
    table = total(comm, table)
    counts = total(comm, label_table(datasets, table, names))
    whole = silo_federation(datasets, table, counts, names)
    if not settings.data.validation:
        return whole
    held = hold_out(whole, settings.data.validation, settings.seed)
    return replace(held, label_counts=total(comm, held.label_counts))


def describe_width() -> int:
    return describe({}).shape[1]


def total(comm: Communicator, table: np.ndarray) -> np.ndarray:
    """Sum of an int64 table over ranks, on every rank."""
    flat = torch.from_numpy(table).flatten().to(comm.device)
    if comm.rank == 0:
        parts = [torch.empty_like(flat) for _ in range(1, comm.size)]
        comm.exchange([], list(enumerate(parts, 1)))
        flat = sum(parts, flat)
    else:
        comm.exchange([(0, flat)], [])
    comm.broadcast(flat)
    return flat.cpu().view(table.shape).numpy()
