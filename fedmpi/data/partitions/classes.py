"""Label skew by a number of classes a client, "#C = k"."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.parts import Partition, check_classes, check_enough, equal_sizes


def classes(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, k: Annotated[int, Field(ge=1)] = 2
) -> Partition:
    """Every client holds exactly k classes; a class is divided evenly among those who hold it (NIID-Bench, Li 2022).

    Client i holds class i mod C and k - 1 others, uniform without replacement. The shuffled samples of a class go in
    equal parts to its clients; those of a class that nobody drew, which only N < C allows, to nobody.
    """
    check_classes(labels, "classes")
    check_enough(len(labels), clients, "classes")
    names = np.unique(labels)
    if k > len(names):
        raise UserError(f"data.partition: k={k} classes a client, but there are {len(names)}; lower `k`")
    holds = np.zeros((clients, len(names)), dtype=bool)
    for i, row in enumerate(holds):
        own = i % len(names)
        row[own] = True
        row[rng.permutation(np.delete(np.arange(len(names)), own))[: k - 1]] = True
    owner = np.full(len(labels), -1)
    for c, label in enumerate(names):
        owners, rows = np.flatnonzero(holds[:, c]), rng.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(owners):
            raise UserError(
                f"data.partition: class {label} has {len(rows)} samples for the {len(owners)} clients that drew it; "
                "lower `clients` or `k`"
            )
        if len(owners):
            owner[rows] = np.repeat(owners, equal_sizes(len(rows), len(owners)))
    return Partition.from_owners(owner, clients)
