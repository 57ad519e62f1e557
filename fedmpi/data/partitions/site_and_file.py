"""Partitions that are given: by the natural sites of the data, or by a file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.csv_file import read_csv_table
from fedmpi.data.partitions.base import LEAVE_OUT_CLIENTS, Partition, validate_indices


def site(labels: np.ndarray, clients: int, rng: np.random.Generator, only: tuple[int | str, ...] = ()) -> Partition:
    """One client for each natural site; `labels` has the site 0..N-1 of each sample.

    only: the sites that are clients, by name, or by number if they have no names. No client trains on the other sites,
    but their rows remain in the global test set and in evaluate.protocol's `sites`. Use it to measure how well one
    site does alone, or how well a model does at a site that it was not trained on.
    """
    present, chosen = np.unique(labels), np.array(only or range(clients), dtype=np.int64)
    if clients != len(chosen):
        raise UserError(f"data.partition: only names {len(only)} sites, clients={clients}; {LEAVE_OUT_CLIENTS}")
    if not only and not np.array_equal(present, chosen):
        raise UserError(
            f"data.partition: scheme site makes one client of each site 0, 1, ..., clients={clients}, but the training "
            f"samples belong to sites {present.tolist()}; {LEAVE_OUT_CLIENTS}, or number sites without a gap"
        )
    client = np.full(max(present[-1], chosen.max()) + 1, -1)
    client[chosen] = np.arange(clients)
    return Partition.from_owners(client[labels], clients)


def file(labels: np.ndarray, clients: int | None, rng: np.random.Generator, *, path: Path) -> Partition:
    """A partition read from a file: .csv with a client for each training sample, or .npz of an earlier run.

    A .csv file has a column `client` and one line for each training sample, with -1 for samples that no client gets.
    The .npz file is the partition.npz of a run directory.

    path: the file, relative to the working directory.
    """
    path = path.expanduser()
    readers = {".csv": _read_csv, ".npz": _read_npz}
    if path.suffix not in readers:
        raise UserError(f"data.partition.path: {path}: a name that ends in .csv or .npz is needed")
    try:
        parts = readers[path.suffix](path, len(labels))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"data.partition.path: {path} is no partition ({error})") from error
    if not parts:
        raise UserError(f"data.partition.path: {path} names no client")
    if clients is not None and clients != len(parts):
        raise UserError(f"data.partition: {path} has {len(parts)} clients, and clients={clients}; {LEAVE_OUT_CLIENTS}")
    return parts.ascending()


def _read_csv(path: Path, samples: int) -> Partition:
    def check_header(names: Sequence[str]) -> None:
        if "client" not in names:
            raise ValueError(f"its first line names no column `client`: {', '.join(names)}")

    header, rows = read_csv_table(path, ",", check_header)
    place, owners = header.index("client"), []
    for line, row in rows:
        if not row[place].removeprefix("-").isdecimal() or not -1 <= int(row[place]) < samples:
            raise ValueError(f"line {line}: client is {row[place]!r}; 0 to {samples - 1} or -1 for nobody is allowed")
        owners.append(int(row[place]))
    if len(owners) != samples:
        raise ValueError(f"it has {len(owners)} lines below its header; {samples} training samples need one each")
    return Partition.from_owners(np.array(owners, dtype=np.int64), max(owners, default=-1) + 1)


def _read_npz(path: Path, samples: int) -> Partition:
    """Read `indices`, client after client, and `offsets` (N + 1,), of the training rows.

    Rows that the run held out for validation are added to the rows of their client.
    """
    pieces = []
    with np.load(path, allow_pickle=False) as arrays:
        for kind in [kind for kind in ("", "validation_") if f"{kind}offsets" in arrays]:
            indices, offsets = arrays[f"{kind}indices"], arrays[f"{kind}offsets"]
            ascend = offsets.ndim == 1 and offsets.dtype.kind in "iu" and (np.diff(offsets) >= 0).all()
            if not ascend or [*offsets[:1], *offsets[-1:]] != [0, len(indices)]:
                raise ValueError("offsets that ascend from 0 to the number of indices are needed")
            pieces.append(np.split(indices, offsets[1:-1]))
    return Partition.from_parts(validate_indices(np.concatenate(own), samples) for own in zip(*pieces, strict=True))
