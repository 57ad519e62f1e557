"""Samples at random in equal parts; with noise that grows from client to client, if wanted."""

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

LEVEL = 0.1  # of feature noise


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Uniform at random, in equal parts; the first n mod N clients hold one sample more."""
    check_enough(len(labels), clients, "iid")
    sizes = equal_sizes(len(labels), clients)
    return Partition.from_sizes(rng.permutation(len(labels)), sizes).ascending()


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
        raise UserError(
            f"data.partition: feature_noise adds to numbers, and samples are {x.dtype}; take another scheme"
        )
    for i, part in enumerate(parts):
        rows = torch.from_numpy(part)
        noise = torch.randn((len(rows), *numbers.shape[1:]), generator=seeds.generator(seed, "feature noise", i))
        numbers[rows] += noise * (level * i / max(len(parts) - 1, 1)) * unit
    if not bool(numbers.isfinite().all()):
        raise UserError(f"data.partition.level: {level:g} makes numbers beyond what {numbers.dtype} holds; lower it")
    return x.like(numbers) if isinstance(x, Pictures) and x.look.bytes else numbers
