"""Samples at random: in equal parts, or in parts whose sizes alone differ."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.checks import check_enough, check_least
from fedmpi.data.partitions.parts import Partition, equal_sizes

MAX_ENTRIES = 10_000_000  # shares drawn before giving up: two or three seconds


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Uniform at random, in equal parts; the first n mod N clients hold one sample more."""
    check_enough(len(labels), clients, "iid")
    sizes = equal_sizes(len(labels), clients)
    return Partition.from_sizes(rng.permutation(len(labels)), sizes).ascending()


def quantity(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = 0.5,
    min_size: Annotated[int, Field(ge=1)] = 10,
) -> Partition:
    """Quantity skew: samples at random, in parts of sizes q n; smaller alpha, stronger skew (NIID-Bench, Li 2022).

    q ~ Dir(alpha 1_N), drawn until every client has min_size samples; the permuted samples are cut at
    floor(cumsum(q) n).
    """
    n = len(labels)
    check_enough(n, clients, "quantity")
    check_least(n, clients, min_size)
    for _ in range(-(-MAX_ENTRIES // clients)):
        q = rng.dirichlet(np.full(clients, alpha))
        ends = np.floor(np.cumsum(q)[:-1] * n).astype(np.int64)
        sizes = np.diff(ends, prepend=0, append=n)
        if sizes.min() >= min_size:
            return Partition.from_sizes(rng.permutation(n), sizes).ascending()
    raise UserError(
        f"data.partition: no draw of quantity (alpha={alpha}, clients={clients}) gave every client "
        f"min_size={min_size} of the {n} samples; raise alpha, or lower `clients` or min_size"
    )
