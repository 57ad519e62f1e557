"""GradProj: each local step removes the component of the gradient that conflicts with staying near the received model.

A baseline in the FedSOL paper. Lee et al. CVPR 2024, Table 1. https://arxiv.org/abs/2308.12532

g_p is the gradient of a distance to the received model w0, and g_l that of the loss. All parameters form one vector.
g_l = grad CE(f_w(x), y),   g_p = grad KL(softmax(f_w0 / tau) || softmax(f_w / tau))
g   = g_l - (<g_l, g_p> / ||g_p||^2) g_p   if <g_l, g_p> < 0,   else g_l                                         (1)
distance: l2 uses g_p = w - w0, the gradient of ||w - w0||^2 / 2. At w = w0 both distances have their minimum and g_p is
set to 0, although rounding, dropout or batch statistics would give a small gradient. The first step of a round is
therefore FedAvg's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.method import CLASSES, Client, Method, declared_property, option
from fedmpi.methods._terms import distillation_with_exact_zero


@dataclass(frozen=True)
class GradProj(Method):
    """GradProj: local gradients, projected to be orthogonal to a proximal gradient if they conflict."""

    tau: float = option(3.0, "temperature of teacher and student", gt=0)
    distance: str = option(
        "kl", "distance whose gradient is g_p: between outputs (kl), or between weights (l2)", choices=("kl", "l2")
    )

    loss_is_sample_mean = True

    @declared_property
    def needs(self) -> frozenset[str]:
        return frozenset({CLASSES} if self.distance == "kl" else ())

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        g_l = client.grad(x, y)
        if client.at_w0:
            return g_l
        if self.distance == "l2":
            return project_out_conflict(g_l, client.w - client.w0)
        return project_out_conflict(g_l, client.grad(x, y, loss=self._distillation_loss))

    def _distillation_loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        _, teacher = client.reference_forward(x)
        return distillation_with_exact_zero(client.logits(x), teacher, self.tau)


def project_out_conflict(g_l: Tensor, g_p: Tensor) -> Tensor:
    """Return g (d,), Eq. (1), for g_l (d,) and g_p (d,); it is g_l if g_p consists of rounding errors only."""
    along, square = g_l @ g_p, g_p @ g_p
    return torch.where((along < 0) & (square >= 1e-24), g_l - along / square * g_p, g_l)  # (1)
