"""FedSAM: each local step takes its gradient at perturbed weights with a higher loss (sharpness-aware minimisation).

Qu, Li, Duan, Liu, Tang, Lu. Generalized Federated Learning via Sharpness Aware Minimization. ICML 2022.
https://arxiv.org/abs/2206.02618

eps = rho g / ||g||,   g = grad F_k(w)       one norm over all parameters, the same batch in both passes       (1)
w  <- w - lr grad F_k(w + eps)               a step from w                                                     (2)
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import SGD_STEPS, Client, Method, option
from fedmpi.methods._terms import scale_perturbation


@dataclass(frozen=True)
class FedSAM(Method):
    """FedSAM: sharpness-aware local steps."""

    rho: float = option(0.1, "length of the perturbation; 0: FedAvg", ge=0)

    needs = frozenset({SGD_STEPS})
    loss_is_sample_mean = True
    equals_fedavg_at = {"rho": 0.0}

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        g = client.grad(x, y)
        return client.grad(x, y, at=client.w + scale_perturbation(g, self.rho)) if self.rho else g  # (1), (2)
