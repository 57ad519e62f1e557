"""The class Partition (the row numbers of each client), and the checks that partition schemes share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np

from fedmpi.common.errors import UserError

LEAVE_OUT_CLIENTS = "remove data.partition.clients (or set it to null if a base config sets it)"


@final
class Partition:
    """The rows of N clients, stored as two arrays to save memory with many clients.

    The rows of client k are `order[offsets[k] : offsets[k + 1]]`, without a copy.

    Args:
        order: the rows of client 0, then those of client 1, and so on, (n,) int64.
        offsets: the index in `order` at which each client's rows begin, and n as the last entry, (N + 1,) int64.

    >>> parts = Partition.from_owners(np.array([1, 0, -1, 1]), clients=2)
    >>> [part.tolist() for part in parts], parts.sizes.tolist()
    ([[1], [0, 3]], [1, 2])
    """

    def __init__(self, order: np.ndarray, offsets: np.ndarray) -> None:
        self.order, self.offsets = order, offsets
        self.label_matrix: np.ndarray | None = None  # (N, s) the class of each client's shards, set by `shards`

    @classmethod
    def from_sizes(cls, order: np.ndarray, sizes: np.ndarray) -> Partition:
        """Cut the row numbers `order`, (n,), into a partition with parts of the given sizes, (N,)."""
        return cls(order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @classmethod
    def from_parts(cls, parts: Iterable[np.ndarray]) -> Partition:
        """Return the partition with the given array of row numbers for each client."""
        parts = list(parts)
        order = np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
        return cls.from_sizes(order, np.array([len(part) for part in parts], dtype=np.int64))

    @classmethod
    def from_owners(cls, owner: np.ndarray, clients: int) -> Partition:
        """Return the partition that assigns each row to its owner; the rows of each client are in ascending order.

        Args:
            owner: the client of each row, (rows,); -1 for rows without a client.
            clients: number of clients.
        """
        rows = np.flatnonzero(owner >= 0)
        sizes = np.bincount(owner[rows], minlength=clients)
        return cls.from_sizes(_sort_by_owner(owner[rows].astype(np.int64), rows), sizes)

    @property
    def sizes(self) -> np.ndarray:
        """The number of rows of each client, (N,) int64."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> np.ndarray:
        """The client of each entry of `order`, (n,) int64."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def ascending(self) -> Partition:
        """Return the same partition with the rows of each client in ascending order."""
        return Partition(_sort_by_owner(self.owner, self.order), self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[k] for k in range(len(self)))


def validate_indices(part: Any, samples: int) -> np.ndarray:
    """Check a client's row numbers, and return them in ascending order, (n,) int64.

    Args:
        part: the row numbers as a partition scheme returned them.
        samples: number of training samples.

    Raises:
        ValueError: `part` is not a one-dimensional array of integers in 0..samples-1.
    """
    indices = np.asarray(part)
    is_vector = indices.ndim == 1 and (indices.dtype.kind in "iu" or not len(indices))
    if not is_vector or indices.min(initial=0) < 0 or indices.max(initial=0) >= samples:
        what = f"indices {indices.min()}..{indices.max()}" if is_vector else f"{type(part).__name__} {indices.shape}"
        raise ValueError(f"{what} of {indices.dtype}; must be an array (n,) of integers in 0..{samples - 1}")
    return np.sort(indices.astype(np.int64))


def _sort_by_owner(owner: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return row numbers sorted by owner, and in ascending order within each owner, (n,).

    This sorts the numbers owner * span + row, where `span` is greater than all row numbers, because that is several
    times faster than an argsort.
    """
    span = int(rows.max(initial=0)) + 1
    return np.sort(owner * span + rows) % span


def equal_sizes(rows: int, parts: int) -> np.ndarray:
    """Return the sizes of nearly equal parts, (parts,); if there is a remainder, the first parts have one more row.

    >>> equal_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    return rows // parts + (np.arange(parts) < rows % parts)


def check_enough_samples(samples: int, parts: int, scheme: str, min_size: int = 1, unit: str = "") -> None:
    """Raise UserError if there are too few samples for `parts` parts of at least `min_size` samples each.

    Args:
        samples: number of samples.
        parts: number of parts.
        scheme: the name of the scheme, for the message.
        min_size: smallest allowed size of a part.
        unit: what the message calls the parts, for example "6 shards"; "" if each part is a client.
    """
    if samples < parts:
        what = unit or f"{parts} parts"
        raise UserError(
            f"data.partition: scheme {scheme} cannot split {samples} samples into {what} with at least one sample "
            "each; lower data.partition.clients"
        )
    if samples < min_size * parts:
        raise UserError(
            f"data.partition.min_size: {min_size} is too large, because {samples} samples divided among {parts} "
            f"clients are only {samples / parts:.1f} per client; lower data.partition.clients, or set "
            f"data.partition.min_size to at most {samples // parts}"
        )


def check_class_labels(labels: np.ndarray, scheme: str) -> None:
    """Raise UserError unless labels consist of one class number per sample."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        kind = f"{labels.dtype} (regression)" if labels.ndim == 1 else f"arrays of shape {labels.shape[1:]}"
        raise UserError(
            f"data.partition: scheme {scheme} divides samples by class, but the targets are {kind}; set "
            "data.partition.scheme "
            "to "
            "iid, quantity or site"
        )
