"""FedSOL. Lee, Jeong, Kim, Oh, Yun. Stabilized Orthogonal Learning. CVPR 2024. https://arxiv.org/abs/2308.12532

Each step, at weights w with the received model w0 as frozen teacher:
    L_p = (1/B) sum_b sum_c q log(q / s),   q = softmax(f_w0 / tau),  s = softmax(f_w / tau)                 (5)
    g_p = grad L_p on the perturbed tensors, 0 elsewhere
    Lambda^(m) = |w^(m) - w0^(m)| / ||w^(m) - w0^(m)||      for each perturbed tensor m, elementwise          (7)
    eps = rho Lambda g_p / ||g_p||                                                                           (6)
    w <- w - lr grad CE(f_{w + eps}(x), y)                   taken at w, all parameters                       (4)
At the first step of a round w = w0, so eps = 0 exactly. With layers: head the body is unperturbed and one body pass
serves both gradients.
norm: dim0 is the authors' code (Lambda per column); Table 5 compares layers, adaptive: false is the fixed Lambda = 1.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedmpi.layout import HEAD
from fedmpi.method import CLASSES, FEATURES, Client, Method
from fedmpi.options import option
from fedmpi.rules import distillation


@final
@dataclass(frozen=True)
class FedSOL(Method):
    rho: float = option(2.0, "length of the perturbation; 0: FedAvg", ge=0)
    tau: float = option(3.0, "temperature of teacher and student", gt=0)
    layers: str = option("head", "what is perturbed", choices=("head", "body", "all"))
    adaptive: bool = option(True, "scale the perturbation by how far each weight has moved (7); false: Lambda = 1")
    norm: str = option("layer", "norm in (7): of the tensor, or along its first dimension", choices=("layer", "dim0"))

    paper = "Lee et al., CVPR 2024"
    needs = frozenset({FEATURES, CLASSES})
    neutral = {"rho": 0.0}

    def step(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        if not self.rho:
            return k.grad(x, y)
        _, teacher = k.frozen(x)
        if self.layers == "head":
            z, _ = k.forward(x)
            g_p = k.head_grad(z, lambda f: distillation(f, teacher, self.tau))  # (5)
            return k.grad_through(z, lambda f: k.task_loss(f, x, y), at=k.w + self.perturbation(k, g_p))  # (4)
        g_p = k.grad(x, y, loss=lambda k, x, _: distillation(k.logits(x), teacher, self.tau))  # (5)
        for s in k.segments((HEAD,)) if self.layers == "body" else ():
            s.view(g_p).zero_()
        return k.grad(x, y, at=k.w + self.perturbation(k, g_p))  # (4)

    def perturbation(self, k: Client, g_p: Tensor) -> Tensor:
        """eps of (6), (d,); 0 where g_p is nothing but rounding noise."""
        length = g_p.norm()
        if length < 1e-10:
            return torch.zeros_like(g_p)
        if not self.adaptive:
            return g_p * (self.rho / length)
        strength = (k.w - k.w0).abs_()
        for s in k.segments() if self.layers != "head" else k.segments((HEAD,)):
            moved = s.view(strength)
            moved /= moved.norm(dim=0 if self.norm == "dim0" else None, keepdim=True).clamp(min=1e-12)  # (7)
        return strength.mul_(g_p).mul_(self.rho / length)  # (6)
