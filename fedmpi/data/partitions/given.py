"""Partitions that are given: by the natural sites of the data, or by a file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.csv_file import csv_table
from fedmpi.data.partitions.parts import LEAVE_OUT, Partition, equal_sizes


def site(labels: np.ndarray, clients: int, rng: np.random.Generator, only: tuple[int | str, ...] = ()) -> Partition:
    """One client per natural site; `labels` holds the site 0..N-1 of each sample.

    only: the sites that are clients, by name, or by number where they have none; nobody trains on the others, but they
    stay in the global test set and in evaluate.protocol's `sites`: what one site has alone, or what a site gets from a
    model made without it.
    """
    if only:
        if clients != len(only):
            raise UserError(f"data.partition: only names {len(only)} sites, clients={clients}; {LEAVE_OUT}")
        chosen = np.array(only, dtype=np.int64)
        client = np.full(max(labels.max(), chosen.max()) + 1, -1)
        client[chosen] = np.arange(clients)
        return Partition.from_owners(client[labels], clients)
    present = np.unique(labels)
    if 0 not in present:
        raise UserError(
            f"data.partition: the training samples belong to sites {present.tolist()}, but the numbers of sites begin "
            "at 0; number them 0, 1, 2, ... without a gap"
        )
    if not np.array_equal(present, np.arange(clients)):
        raise UserError(
            f"data.partition: scheme site makes one client of each site, clients={clients}, but the training "
            f"samples belong to sites {present.tolist()}; {LEAVE_OUT}, set it to the number of sites, or take "
            "scheme domain, which divides a site among several clients"
        )
    return Partition.from_owners(labels, clients)


def domain(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Several clients per natural site, or domain: each site's samples in equal parts at random among its clients.

    `labels` holds the site of each sample. Clients are dealt to sites evenly, in order: with 4 domains and 10 clients
    the first two have three each, the others two.
    """
    present = np.unique(labels)
    if clients < len(present):
        raise UserError(
            f"data.partition: scheme domain needs a client for each of the {len(present)} sites, clients={clients}; "
            "raise `clients`"
        )
    by_site = Partition.from_owners(np.searchsorted(present, labels), len(present))
    clients_of_site = Partition.from_sizes(np.arange(clients), equal_sizes(clients, len(present)))
    owner = np.empty(len(labels), dtype=np.int64)
    for name, rows, own in zip(present, by_site, clients_of_site, strict=True):
        if len(rows) < len(own):
            raise UserError(
                f"data.partition: site {name} has {len(rows)} samples for {len(own)} clients; lower `clients`"
            )
        owner[rng.permutation(rows)] = np.repeat(own, equal_sizes(len(rows), len(own)))
    return Partition.from_owners(owner, clients)


NOBODY = -1


def file(labels: np.ndarray, clients: int | None, rng: np.random.Generator, *, path: Path) -> Partition:
    """Given as a file: .csv, a column `client` with a line for each training sample (-1: nobody's), .json or .npz.

    JSON holds each client's training samples as numbers from 0: [[0, 5], [1, 2], ...] or {"0": [0, 5], ...}; .npz is
    the partition.npz of a run directory. path: the file, relative to the working directory.
    """
    path = path.expanduser()
    reads = {".csv": _csv, ".json": _json, ".npz": _npz}
    if path.suffix not in reads:
        raise UserError(f"data.partition.path: {path}: a name that ends in .csv, .json or .npz is needed")
    try:
        parts = reads[path.suffix](path, len(labels))
    except OSError as error:
        raise UserError(f"data.partition.path: {path}: {error.strerror}; correct the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.partition.path: {path} is no text in UTF-8 ({error})") from error
    if not parts:
        raise UserError(f"data.partition.path: {path} names no client")
    if clients is not None and clients != len(parts):
        raise UserError(f"data.partition: {path} has {len(parts)} clients, and clients={clients}; {LEAVE_OUT}")
    return parts.ascending()


def _csv(path: Path, samples: int) -> Partition:
    header, rows = csv_table(path, ",", lambda names: _check_header(path, names))
    place = header.index("client")
    owner = np.array([_owner(path, line, row[place], samples) for line, row in rows], dtype=np.int64)
    if len(owner) != samples:
        raise UserError(
            f"data.partition.path: {path} has {len(owner)} lines, but there are {samples} training samples; one line "
            "a sample is needed, in the order of the data"
        )
    return Partition.from_owners(owner, int(owner.max(initial=NOBODY)) + 1)


def _check_header(path: Path, names: Sequence[str]) -> None:
    if "client" not in names:
        raise UserError(f"data.partition.path: {path}: its first line names no column `client`: {', '.join(names)}")


def _owner(path: Path, line: int, text: str, samples: int) -> int:
    try:
        owner = int(text)
    except ValueError:
        owner = NOBODY - 1
    if not NOBODY <= owner < samples:
        raise UserError(
            f"data.partition.path: {path}, line {line}: client is {text!r}; a number from 0 to {samples - 1} is "
            f"needed, of {samples} training samples, or -1 for nobody"
        )
    return owner


def _json(path: Path, samples: int) -> Partition:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"data.partition.path: {path} is no JSON: {error}") from error
    if isinstance(found, dict):
        if sorted(found) != sorted(map(str, range(len(found)))):
            raise UserError(f'data.partition.path: {path}: its keys must be "0", "1", ... without a gap')
        found = [found[str(k)] for k in range(len(found))]
    lists = found if isinstance(found, list) else [found]
    wrong = next((k for k, part in enumerate(lists) if not _indices(part, samples)), None)
    if wrong is not None:
        raise UserError(
            f"data.partition.path: {path}: client {wrong}: a list of whole numbers 0..{samples - 1} is needed"
        )
    return Partition.from_parts(np.array(part, dtype=np.int64) for part in lists)


def _npz(path: Path, samples: int) -> Partition:
    """`indices`, client after client, and `offsets` (N + 1,); what a run has held out for validation belongs to it."""
    try:
        with np.load(path, allow_pickle=False) as found:
            kinds = [kind for kind in ("", "validation_") if f"{kind}offsets" in found]
            pieces = [_checked(found[f"{kind}indices"], found[f"{kind}offsets"]) for kind in kinds]
        sizes = sum((piece.sizes for piece in pieces), np.zeros(len(pieces[0]), dtype=np.int64))
    except (ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"data.partition.path: {path} is no partition.npz of a run ({error})") from error
    order = np.concatenate([piece.order for piece in pieces])
    if len(order) and not 0 <= order.min() <= order.max() < samples:
        raise UserError(f"data.partition.path: {path} is of other data: whole numbers 0..{samples - 1} are needed")
    by_client = np.argsort(np.concatenate([piece.owner for piece in pieces]), kind="stable")
    return Partition.from_sizes(order[by_client], sizes)


def _checked(indices: np.ndarray, offsets: np.ndarray) -> Partition:
    """Two arrays of a file as a partition. Raises ValueError where they are none."""
    whole = all(each.ndim == 1 and each.dtype.kind in "iu" for each in (indices, offsets))
    if not whole or not len(offsets) or offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets that ascend from 0 to the number of indices are needed")
    return Partition(indices.astype(np.int64), offsets.astype(np.int64))


def _indices(part: Any, samples: int) -> bool:
    return isinstance(part, list) and all(type(i) is int and 0 <= i < samples for i in part)
