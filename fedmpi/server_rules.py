"""Server rules that a config may choose in place of the method's own:  server.rule: principal | {name: principal,
keep: 0.5}.

A rule is `f(up, s, **options) -> (s,)`: the gathered updates and the server's view in, the direction out.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmpi import rules
from fedmpi.method import Server, Uploads

registry: dict[str, str] = {
    "mean": "fedmpi.server_rules:mean",
    "principal": "fedmpi.server_rules:principal",
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
