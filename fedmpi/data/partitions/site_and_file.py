"""Partitions that are given in advance: by the natural sites of the data, or by a file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.csv_file import read_csv_table
from fedmpi.data.partitions.base import LEAVE_OUT_CLIENTS, Partition, validate_indices


def partition_by_site(
    labels: np.ndarray, clients: int, rng: np.random.Generator, only: tuple[int | str, ...] = ()
) -> Partition:
    """One client for each natural site of the data set, such as a hospital.

    only: the sites that are clients, by name, or by number if they have no names. No client trains on the other sites,
    but their test rows remain in the global test set and in evaluate.protocol's `sites`. With this option a run can
    train on one site alone, or test a model at a site on which it was not trained.
    """
    present, chosen = np.unique(labels), np.array(only or range(clients), dtype=np.int64)
    if clients != len(chosen):
        raise UserError(
            f"data.partition.clients: {clients} differs from the {len(only)} sites of data.partition.only; "
            f"{LEAVE_OUT_CLIENTS}"
        )
    if not only and not np.array_equal(present, chosen):
        raise UserError(
            f"data.partition: scheme site needs one client for each of the sites 0, 1, ..., but clients is {clients}, "
            f"and the training samples belong to sites {present.tolist()}; number the sites without gaps, and "
            f"{LEAVE_OUT_CLIENTS}"
        )
    client = np.full(max(present[-1], chosen.max()) + 1, -1)
    client[chosen] = np.arange(clients)
    return Partition.from_owners(client[labels], clients)


def partition_from_file(labels: np.ndarray, clients: int | None, rng: np.random.Generator, *, path: Path) -> Partition:
    """A partition read from a file: a .csv file with the client of each training sample, or the .npz of a run.

    A .csv file has a column `client` and one line for each training sample, with -1 for samples that no client gets.
    The .npz file is the partition.npz of a run directory.

    path: the file, relative to the working directory.
    """
    path = path.expanduser()
    readers = {".csv": _read_csv, ".npz": _read_npz}
    if path.suffix not in readers:
        raise UserError(f"data.partition.path: {path} is not allowed; the file name must end in .csv or .npz")
    try:
        parts = readers[path.suffix](path, len(labels))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"data.partition.path: {path} cannot be read as a partition: {error}") from error
    if not parts:
        raise UserError(
            f"data.partition.path: {path} assigns no sample to any client; assign samples to at least one client"
        )
    if clients is not None and clients != len(parts):
        raise UserError(
            f"data.partition.clients: {clients} differs from the {len(parts)} clients in {path}; {LEAVE_OUT_CLIENTS}"
        )
    return parts.ascending()


def _read_csv(path: Path, samples: int) -> Partition:
    """Read a .csv file whose column `client` contains the client of each training sample.

    samples: the number of training samples.
    """

    def check_header(names: Sequence[str]) -> None:
        if "client" not in names:
            raise ValueError(f"it has no column `client`; its columns: {', '.join(names)}")

    header, rows = read_csv_table(path, ",", check_header)
    column, owners = header.index("client"), []
    for line, row in rows:
        if not row[column].removeprefix("-").isdecimal() or not -1 <= int(row[column]) < samples:
            raise ValueError(f"line {line}: client is {row[column]!r}; must be 0 to {samples - 1}, or -1 for no client")
        owners.append(int(row[column]))
    if len(owners) != samples:
        raise ValueError(
            f"it has {len(owners)} lines after the header, but must have {samples}, one per training sample"
        )
    return Partition.from_owners(np.array(owners, dtype=np.int64), max(owners, default=-1) + 1)


def _read_npz(path: Path, samples: int) -> Partition:
    """Read the partition.npz of a run.

    Its array `indices` contains the row numbers of client 0, then those of client 1, and so on. Its array `offsets`,
    (N + 1,), contains the position at which each client's rows begin, and the total number of rows. Rows that the run
    held out for validation are returned to their clients.
    """
    pieces = []
    with np.load(path, allow_pickle=False) as arrays:
        for kind in [kind for kind in ("", "validation_") if f"{kind}offsets" in arrays]:
            indices, offsets = arrays[f"{kind}indices"], arrays[f"{kind}offsets"]
            ascend = offsets.ndim == 1 and offsets.dtype.kind in "iu" and (np.diff(offsets) >= 0).all()
            if not ascend or [*offsets[:1], *offsets[-1:]] != [0, len(indices)]:
                raise ValueError("its offsets must ascend from 0 to the number of indices")
            pieces.append(np.split(indices, offsets[1:-1]))
    return Partition.from_parts(validate_indices(np.concatenate(own), samples) for own in zip(*pieces, strict=True))
