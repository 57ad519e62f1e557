"""Samples at random: in equal parts, in parts whose sizes alone differ, or in equal parts with more and more noise."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Samples
from fedmpi.data.partitions.parts import Partition, check_enough, equal_sizes
from fedmpi.data.pictures import Pictures

MOST_DRAWS, MOST_SHARES = 100_000, 10_000_000  # drawn before giving up: a few seconds
LEVEL = 0.1  # of feature noise


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
    draws = max(min(MOST_DRAWS, MOST_SHARES // clients), 1)
    for _ in range(draws):
        q = rng.dirichlet(np.full(clients, alpha))
        ends = np.floor(np.cumsum(q)[:-1] * n).astype(np.int64)  # (N - 1,)
        sizes = np.diff(ends, prepend=0, append=n)
        if sizes.min() >= min_size:
            return Partition.from_sizes(rng.permutation(n), sizes).ascending()
    raise UserError(
        f"data.partition: none of {draws} draws of quantity (alpha={alpha}, clients={clients}) gave every client "
        f"min_size={min_size} of the {n} samples; raise alpha, or lower `clients` or min_size"
    )


def feature_noise(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    level: Annotated[float, Field(gt=0, allow_inf_nan=False)] = LEVEL,
) -> Partition:
    """Feature skew: equal parts at random, client i's x with noise N(0, (level i / (N - 1))^2) (NIID-Bench, Li 2022).

    level is in units of x as models see it. Drawn once a sample, as in the paper (its code draws anew at each
    visit); test samples have none, as there. The paper's text has level i / N for the variance; this is its code.
    """
    return iid(labels, clients, rng)


def noisy(x: Samples | Pictures, parts: Partition, seed: int, level: float = LEVEL) -> Tensor | Pictures:
    """A copy of x, in which the rows of client i bear its noise. Pictures of bytes stay in units of a byte, not
    normalised, so that the border that an augmentation adds is black as ever."""
    unit: Tensor | float = 1.0  # what counts as 1, by channel
    if isinstance(x, Pictures) and x.look.bytes:
        stored = x.stored if isinstance(x.stored, Tensor) else x.stored.all()
        numbers = stored.expand(-1, x.shape[1], *stored.shape[2:]).float()
        unit = 255 * torch.tensor(x.look.normal.numbers[1] if x.look.normal else (1.0,)).view(-1, *[1] * (x.ndim - 2))
    elif isinstance(x, (Tensor, Pictures)) and x.dtype.is_floating_point:
        numbers = x.floats() if isinstance(x, Pictures) else x.clone()
    else:
        reason = f"feature_noise adds noise to numbers, but the samples are {x.dtype}"
        raise UserError(f"data.partition: {reason}; take another scheme")
    for i, part in enumerate(parts):
        rows = torch.from_numpy(part)
        noise = torch.randn((len(rows), *numbers.shape[1:]), generator=seeds.generator(seed, "feature noise", i))
        numbers[rows] += noise * (level * i / max(len(parts) - 1, 1)) * unit
    if not bool(numbers.isfinite().all()):
        raise UserError(f"data.partition.level: {level:g} makes numbers beyond what {numbers.dtype} holds; lower it")
    return x.like(numbers) if isinstance(x, Pictures) and x.look.bytes else numbers
