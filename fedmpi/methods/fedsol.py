"""FedSOL. Lee, Jeong, Kim, Oh, Yun. Stabilized Orthogonal Learning. CVPR 2024. https://arxiv.org/abs/2308.12532

Each step, at weights w with the received model w0 as frozen teacher:
    L_p = (1/B) sum_b sum_c q log(q / s),   q = softmax(f_w0 / tau),  s = softmax(f_w / tau)                 (5)
    g_p = grad L_p on the perturbed tensors, 0 elsewhere
    Lambda^(l) = |w^(l) - w0^(l)| / ||w^(l) - w0^(l)||      for each perturbed layer l, elementwise          (7)
    eps = rho Lambda g_p / ||g_p||                                                                           (6)
    w <- w - lr grad CE(f_{w + eps}(x), y)                   taken at w, all parameters                       (4)
At w = w0, the first step of a round, L_p is least: g_p = 0 and eps = 0 exactly, with Lambda and without, whatever
rounding, dropout or batch statistics make of that gradient. With layers: head one body pass serves both gradients. The
norm in (7) is over a layer, weight and bias together; norm: tensor takes each alone, norm: dim0 is the authors' code.
Table 5: layers, adaptive. prox: g_p of another method's regularizer; its server and client state stay. Its client state
must not presume steps along the regularizer, as (4) makes none: Table 4 with SCAFFOLD, FedNova, FedDyn and MOON is
configs/papers/fedsol_table4.py, the ablations of Table 10 are configs/papers/fedsol_table10.py.
"""

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import HEAD, Segment
from fedmpi.method import CLASSES, FEATURES, SGD_STEPS, Client, Method, borrows, declared, option, overrides
from fedmpi.methods._terms import perturbation, retention, share_of_norm

IN_TABLE_10 = "is an option of configs/papers/fedsol_table10.py:Objective now, which has FedSOL as its option `fedsol`"


@borrows("prox")
@dataclass(frozen=True)
class FedSOL(Method):
    rho: float = option(2.0, "length of the perturbation; 0: FedAvg", ge=0)
    tau: float = option(3.0, "temperature of teacher and student", gt=0)
    layers: str = option("head", "what is perturbed", choices=("head", "body", "all"))
    adaptive: bool = option(True, "scale the perturbation by how far each weight has moved (7); false: Lambda = 1")
    norm: str = option(
        "layer", "norm in (7): of the layer, the tensor, or its columns", choices=("layer", "tensor", "dim0")
    )
    prox: Method | None = field(default=None, metadata={"doc": "method to perturb along, null: (5)", "method": True})

    neutral = {"rho": 0.0}
    MOVED = {"objective": IN_TABLE_10, "beta": IN_TABLE_10}

    def __post_init__(self) -> None:
        # FedDyn by its name, as a method's file imports no other method: its g_k presumes steps along its regularizer.
        if self.prox and (type(self.prox).__name__ == "FedDyn" or not overrides(self.prox, "regularizer")):
            raise UserError(
                f"method.prox: not {self.prox}; it takes a method with a regularizer and without state that presumes "
                "steps along it: fedprox, or one of configs/papers/fedsol_table4.py (SCAFFOLD, FedNova, FedDyn, MOON)"
            )

    @declared
    def needs(self) -> frozenset[str]:
        term = {SGD_STEPS} | (self.prox.needs if self.prox else frozenset({CLASSES}))
        return frozenset(term if self.layers == "all" else term | {FEATURES})

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        if not self.rho or (client.at_w0 and not self.prox):  # at w0 L_p is least: g_p = 0
            return client.grad(x, y)
        if self.layers == "head" and not self.prox:
            (_, teacher), (z, _) = client.frozen(x), client.forward(x)
            g_p = client.head_grad(z.detach(), lambda f: retention(f, teacher, self.tau))  # (5)
            perturbed = client.w + self.perturbation(client, g_p)
            return client.head_grad(z, lambda f: client.task_loss(f, x, y), at=perturbed)  # (4)
        g_p = client.regularizer_grad(self.prox.regularizer) if self.prox else self.distil(client, x, y)
        return client.grad(x, y, at=client.w + self.perturbation(client, g_p))  # (4)

    def distil(self, client: Client, x: Tensor, y: Tensor, at: Tensor | None = None) -> Tensor:
        _, teacher = client.frozen(x)
        return client.grad(x, y, at=at, loss=lambda client, x, _: retention(client.logits(x), teacher, self.tau))  # (5)

    def perturbation(self, client: Client, g_p: Tensor, adaptive: bool = True) -> Tensor:
        """eps of (6), (d,), zero outside the perturbed tensors."""
        g, strength = torch.zeros_like(g_p), torch.zeros_like(g_p)
        for tensors in self.perturbed(client):
            moved = [s.view(client.w) - s.view(client.w0) for s in tensors]
            length = torch.stack([m.norm() for m in moved]).norm().clamp(min=1e-12)  # of the layer
            for s, m in zip(tensors, moved, strict=True):
                s.view(g).copy_(s.view(g_p))
                share = m.abs() / length if self.norm == "layer" else share_of_norm(m, self.norm)
                s.view(strength).copy_(share if self.adaptive and adaptive else torch.ones_like(m))  # (7)
        return perturbation(g, self.rho, strength)  # (6)

    def perturbed(self, client: Client) -> list[list[Segment]]:
        """The perturbed tensors, layer by layer: those that share all of their name but its last word."""
        chosen = [s for s in client.segments() if self.layers == "all" or (s.group == HEAD) == (self.layers == "head")]
        return [list(tensors) for _, tensors in groupby(chosen, key=lambda s: s.name.rpartition(".")[0])]
