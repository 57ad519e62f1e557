"""Server rules that a config may choose in place of the method's own:  server.rule: principal | {name: principal,
keep: 0.5}.

A rule is `f(up, s, **options) -> (s,)`: the gathered updates and the server's view in, the direction out.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmpi import harmony, robust, rules
from fedmpi.method import Server, Uploads

registry: dict[str, str] = {
    "geometric_median": "fedmpi.server_rules:geometric_median",
    "harmonize": "fedmpi.server_rules:harmonize",
    "krum": "fedmpi.server_rules:krum",
    "mean": "fedmpi.server_rules:mean",
    "median": "fedmpi.server_rules:median",
    "principal": "fedmpi.server_rules:principal",
    "trimmed_mean": "fedmpi.server_rules:trimmed_mean",
}


def mean(up: Uploads, s: Server) -> Tensor:
    """Weighted mean of the updates (FedAvg)."""
    return up.mean("dw")


def principal(
    up: Uploads,
    s: Server,
    keep: Annotated[float, Field(gt=0, le=1)] = 0.8,
    share: Literal["sum", "l2"] = "sum",
    scope: Literal["model", "tensor"] = "model",
) -> Tensor:
    """Updates revised along their leading principal directions (FedLD): `keep` of m directions, over the model or
    each tensor.
    """
    if scope == "model":
        return up.combine(rules.principal_coefficients(up.gram("dw"), up.p, keep, share))
    parts = [
        rules.combine(up.dw[:, a:b], rules.principal_coefficients(up.gram("dw", (a, b)), up.p, keep, share))
        for _, a, b in s.segments
    ]
    return torch.cat(parts)


def harmonize(up: Uploads, s: Server) -> Tensor:
    """Weighted mean of the updates after each pair that conflicts was made orthogonal (FedGH)."""
    return up.combine(harmony.pairwise(up.gram("dw"), up.p))


def median(up: Uploads, s: Server) -> Tensor:
    """Median of every coordinate, all clients alike (Yin 2018)."""
    return robust.trimmed_mean(up.dw, 0.5)


def trimmed_mean(up: Uploads, s: Server, trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1) -> Tensor:
    """Mean of every coordinate without its floor(trim m) smallest and largest values, all clients alike (Yin 2018)."""
    return robust.trimmed_mean(up.dw, trim)


def krum(
    up: Uploads, s: Server, byzantine: Annotated[int, Field(ge=0)] = 1, select: Annotated[int, Field(ge=1)] = 1
) -> Tensor:
    """The update that lies closest to the others, or the mean of the `select` closest; up to `byzantine` of them may
    be anything (Krum, Multi-Krum; Blanchard 2017).
    """
    return up.combine(robust.krum(up.gram("dw"), byzantine, select))


def geometric_median(
    up: Uploads,
    s: Server,
    iterations: Annotated[int, Field(ge=1)] = 100,
    smooth: Annotated[float, Field(gt=0)] = 1e-6,
) -> Tensor:
    """The point with the least weighted sum of distances to the updates (RFA, Pillutla 2022)."""
    return up.combine(robust.geometric_median(up.gram("dw"), up.p, iterations, smooth))
