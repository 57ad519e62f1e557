"""Samples at random: in equal parts, or in parts whose sizes alone differ."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.parts import Partition, check_enough, equal_sizes

MAX_ENTRIES = 10_000_000  # shares drawn before giving up: a second or two
BLOCK = 100_000  # shares judged at once


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
    check_enough(n, clients, "quantity", min_size)
    left, many = -(-MAX_ENTRIES // clients), 1
    while left > 0:  # many draws are judged at once; the generator is then set back to behind the accepted one
        many, before = min(many, left, max(BLOCK // clients, 1)), rng.bit_generator.state
        q = rng.dirichlet(np.full(clients, alpha), size=many)
        ends = np.floor(np.cumsum(q, axis=1)[:, :-1] * n).astype(np.int64)  # (many, N - 1)
        sizes = np.diff(ends, axis=1, prepend=0, append=n)
        good = np.flatnonzero(sizes.min(1) >= min_size)
        if len(good):
            rng.bit_generator.state = before
            rng.dirichlet(np.full(clients, alpha), size=int(good[0]) + 1)
            return Partition.from_sizes(rng.permutation(n), sizes[good[0]]).ascending()
        left, many = left - many, 2 * many
    raise UserError(
        f"data.partition: no draw of quantity (alpha={alpha}, clients={clients}) gave every client "
        f"min_size={min_size} of the {n} samples; raise alpha, or lower `clients` or min_size"
    )
