"""FedSOL, Table 10: the weights at which the gradients of the local loss CE and of beta L_p (proximal) are computed.

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

# The weights for CE, then for L_p: w, e (w + eps), or - (no such term).
PLACES = {"A0": "w-", "A1": "e-", "A2": "we", "A3": "ee", "A4": "ee", "A5": "ww", "A6": "ew"}


@delegates_to("fedsol")
@dataclass(frozen=True)
class Objective(Method):
    objective: str = option("A1", "ablation of Table 10", choices=PLACES)
    beta: float = option(1.0, "weight of L_p in the objectives that hold it", ge=0)
    fedsol: Method = field(default=FedSOL(), metadata={"doc": "FedSOL and its options", "method": True})

    @declared_property
    def needs(self) -> frozenset[str]:
        return self.fedsol.needs

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        sol, least = self.fedsol, client.at_w0  # at w0, L_p has its minimum
        assert isinstance(sol, FedSOL)
        if self.objective in ("A0", "A1"):
            return client.grad(x, y) if self.objective == "A0" else sol.step(client, x, y)
        g_p = sol.distil(client, x, y)
        if self.objective == "A4":
            eps = sol.perturbation(client, g_p + client.grad(x, y), adaptive=False)
        else:
            eps = sol.perturbation(client, torch.zeros_like(g_p) if least else g_p)
        at: dict[str, Tensor | None] = {"w": None, "e": client.w + eps}
        ce, aux = PLACES[self.objective]
        return client.grad(x, y, at=at[ce]).add_(sol.distil(client, x, y, at[aux]), alpha=self.beta)
