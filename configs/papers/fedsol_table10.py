"""Compute the gradients of the local loss CE and the proximal loss beta L_p at different weights (FedSOL, Table 10).

              A0    A1     A2    A3     A4     A5    A6
    CE at     w    w+eps   w    w+eps  w+eps   w    w+eps
    L_p at    -     -     w+eps w+eps  w+eps   w     w

eps is the perturbation of FedSOL, Eq. (6), along the gradient of L_p; in A4 it is along the gradient of CE + L_p and,
as printed, without Lambda. A0 is FedAvg and A1 is FedSOL.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmpi.method import Client, Method, declared_property, delegates_to, option
from fedmpi.methods.fedsol import FedSOL

# The weights at which CE and L_p are computed: w; e (w + eps); or - (no such term).
WEIGHTS = {"A0": "w-", "A1": "e-", "A2": "we", "A3": "ee", "A4": "ee", "A5": "ww", "A6": "ew"}


@delegates_to("fedsol")
@dataclass(frozen=True)
class Objective(Method):
    """The objectives A0 to A6 of FedSOL, Table 10."""

    objective: str = option("A1", "ablation of Table 10", choices=WEIGHTS)
    beta: float = option(1.0, "weight of L_p in the objectives that contain it", ge=0)
    fedsol: Method = field(default=FedSOL(), metadata={"doc": "FedSOL and its options", "method": True})

    @declared_property
    def needs(self) -> frozenset[str]:
        return self.fedsol.needs

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        sol, at_minimum = self.fedsol, client.at_w0  # L_p has its minimum at w0
        assert isinstance(sol, FedSOL)
        if self.objective in ("A0", "A1"):
            return client.grad(x, y) if self.objective == "A0" else sol.step(client, x, y)
        g_p = sol.distillation_gradient(client, x, y)
        if self.objective == "A4":
            eps = sol.perturbation(client, g_p + client.grad(x, y), adaptive=False)
        else:
            eps = sol.perturbation(client, torch.zeros_like(g_p) if at_minimum else g_p)
        at: dict[str, Tensor | None] = {"w": None, "e": client.w + eps}
        ce, aux = WEIGHTS[self.objective]
        return client.grad(x, y, at=at[ce]).add_(sol.distillation_gradient(client, x, y, at[aux]), alpha=self.beta)
