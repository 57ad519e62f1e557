"""GradProj, the orthogonal projection that FedSOL is compared with. Lee et al. CVPR 2024, Table 1.
https://arxiv.org/abs/2308.12532

g_l = grad CE(f_w(x), y),   g_p = grad KL(softmax(f_w0 / tau) || softmax(f_w / tau))     all parameters as one vector
g   = g_l - (<g_l, g_p> / ||g_p||^2) g_p   where <g_l, g_p> < 0,   else g_l                                      (1)
distance: l2 takes g_p = w - w0, the gradient of ||w - w0||^2 / 2. At w = w0 both distances are least and g_p is 0,
whatever rounding, dropout or batch statistics make of it: the first step of a round is FedAvg's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.method import CLASSES, Client, Method, declared, option
from fedmpi.methods._terms import retention


@dataclass(frozen=True)
class GradProj(Method):
    tau: float = option(3.0, "temperature of teacher and student", gt=0)
    distance: str = option("kl", "of what g_p is the gradient: of outputs, or of weights", choices=("kl", "l2"))

    @declared
    def needs(self) -> frozenset[str]:
        return frozenset({CLASSES} if self.distance == "kl" else ())

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        g_l = client.grad(x, y)
        if client.at_w0:
            return g_l
        if self.distance == "l2":
            return without_conflict(g_l, client.w - client.w0)
        _, teacher = client.frozen(x)
        g_p = client.grad(x, y, loss=lambda client, x, _: retention(client.logits(x), teacher, self.tau))
        return without_conflict(g_l, g_p)


def without_conflict(g_l: Tensor, g_p: Tensor) -> Tensor:
    """g_l without what points against g_p.   (d,), (d,) -> (d,); a g_p of rounding noise counts as none."""
    along, square = g_l @ g_p, g_p @ g_p
    return torch.where((along < 0) & (square >= 1e-24), g_l - along / square * g_p, g_l)  # (1)
