"""FedASAM: each local step takes its gradient at perturbed weights with a higher loss (adaptive sharpness-aware steps).

Caldarola, Caputo, Ciccone. Improving Generalization in Federated Learning by Seeking Flat Minima. ECCV 2022.
https://arxiv.org/abs/2203.11834

The perturbation scales with the weights:
eps = rho T^2 g / ||T g||,   g = grad F_k(w)         elementwise; one norm over all parameters                 (1)
T   = |w| + eta on tensors with "weight" in their name, 1 on all other tensors                                 (2)
w  <- w - lr grad F_k(w + eps)                       a step from w                                             (3)
In the comparison by FedSOL's authors, T = |w| on all tensors; for this, set eta: 0 and scaled: all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.method import SGD_STEPS, Client, Method, option


@dataclass(frozen=True)
class FedASAM(Method):
    """FedASAM: adaptive sharpness-aware local steps."""

    rho: float = option(0.7, "length of the perturbation; 0: FedAvg", ge=0)
    eta: float = option(0.2, "added to |w| in (2)", ge=0)
    scaled: str = option("weights", "tensors whose perturbation scales with |w|", choices=("weights", "all"))

    needs = frozenset({SGD_STEPS})
    loss_is_sample_mean = True
    equals_fedavg_at = {"rho": 0.0}

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        g = client.grad(x, y)
        return client.grad(x, y, at=client.w + self.perturbation(client, g)) if self.rho else g  # (3)

    def perturbation(self, client: Client, g: Tensor) -> Tensor:
        T = torch.ones_like(g)
        for s in client.segments():
            if self.scaled == "all" or "weight" in s.name:
                s.view(T).copy_(s.view(client.w).abs() + self.eta)  # (2)
        return T**2 * g * (self.rho / ((T * g).norm() + 1e-12))  # (1)
