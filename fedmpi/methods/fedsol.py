"""FedSOL: each local step takes its gradient at weights that are perturbed along the gradient of a proximal loss.

Lee, Jeong, Kim, Oh, Yun. Stabilized Orthogonal Learning. CVPR 2024. https://arxiv.org/abs/2308.12532

The received model w0 is the fixed teacher of the proximal loss L_p. At the weights w of a step:
    L_p = (1/B) sum_b sum_c q log(q / s),   q = softmax(f_w0 / tau),  s = softmax(f_w / tau)                 (5)
    g_p = grad L_p on the perturbed tensors, 0 elsewhere
    Lambda^(l) = |w^(l) - w0^(l)| / ||w^(l) - w0^(l)||      for each perturbed layer l, elementwise          (7)
    eps = rho Lambda g_p / ||g_p||                                                                           (6)
    w <- w - lr grad CE(f_{w + eps}(x), y)                   a step from w, on all parameters                (4)
At w = w0, in the first step of a round, L_p has its minimum. There g_p and eps are set to exactly 0, even without
Lambda; otherwise rounding, dropout or batch statistics would give a small gradient. With layers: head, both gradients
come from one pass through the body. The norm in (7) is over a layer, weight and bias together. norm: tensor normalises
each tensor separately, norm: dim0 each column of a tensor, as in the authors' code. Table 5 of the paper compares
values of layers and adaptive.

With prox, g_p is the gradient of another method's regularizer, and that method's server and client state are kept. Its
client state must not rely on steps along the regularizer, because (4) takes no such steps. Table 4 of the paper
combines FedSOL with SCAFFOLD, FedNova, FedDyn and MOON; see configs/papers/fedsol_table4.py. For the ablations of Table
10, see configs/papers/fedsol_table10.py.
"""

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import HEAD, Segment
from fedmpi.method import (
    CLASSES,
    FEATURES,
    SGD_STEPS,
    Client,
    Method,
    declared_property,
    delegates_to,
    option,
    overrides,
)
from fedmpi.methods._terms import distillation_with_exact_zero, normalized_magnitude, scale_perturbation

IN_TABLE_10 = "was moved to configs/papers/fedsol_table10.py:Objective, which has FedSOL as its option `fedsol`"


@delegates_to("prox")
@dataclass(frozen=True)
class FedSOL(Method):
    """FedSOL: local steps at weights that are perturbed along the gradient of a proximal loss."""

    rho: float = option(2.0, "length of the perturbation; 0: FedAvg", ge=0)
    tau: float = option(3.0, "temperature of teacher and student", gt=0)
    layers: str = option("head", "layers that are perturbed", choices=("head", "body", "all"))
    adaptive: bool = option(True, "scale the perturbation by how far each weight has moved (7); false: Lambda = 1")
    norm: str = option(
        "layer", "norm in (7): of the layer, the tensor, or its columns", choices=("layer", "tensor", "dim0")
    )
    prox: Method | None = field(
        default=None, metadata={"doc": "method whose regularizer replaces L_p; null: (5)", "method": True}
    )

    loss_is_sample_mean = True
    equals_fedavg_at = {"rho": 0.0}
    REPLACED_OPTIONS = {"objective": IN_TABLE_10, "beta": IN_TABLE_10}

    def __post_init__(self) -> None:
        # FedDyn's g_k assumes steps along its regularizer. It is recognised by its name, because the file of a method
        # imports no other method.
        if self.prox and (type(self.prox).__name__ == "FedDyn" or not overrides(self.prox, "regularizer")):
            raise UserError(
                f"method.prox: {type(self.prox).__name__} is not allowed; must be a method that has a regularizer, but "
                "no state that assumes steps along it, such as fedprox or a class of configs/papers/fedsol_table4.py"
            )

    @declared_property
    def needs(self) -> frozenset[str]:
        term = {SGD_STEPS} | (self.prox.needs if self.prox else frozenset({CLASSES}))
        return frozenset(term if self.layers == "all" else term | {FEATURES})

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        if not self.rho or (client.at_w0 and not self.prox):  # L_p has its minimum at w0: g_p = 0
            return client.grad(x, y)
        if self.layers == "head" and not self.prox and client.accumulate == 1:
            (_, teacher), (z, _) = client.reference_forward(x), client.forward(x)
            g_p = client.head_grad(z.detach(), lambda f: distillation_with_exact_zero(f, teacher, self.tau))  # (5)
            perturbed = client.w + self.perturbation(client, g_p)
            return client.head_grad(z, lambda f: client.task_loss(f, x, y), at=perturbed)  # (4)
        g_p = client.regularizer_grad(self.prox.regularizer) if self.prox else self.distillation_gradient(client, x, y)
        return client.grad(x, y, at=client.w + self.perturbation(client, g_p))  # (4)

    def distillation_gradient(self, client: Client, x: Tensor, y: Tensor, at: Tensor | None = None) -> Tensor:
        def loss(client: Client, x: Tensor, y: Tensor) -> Tensor:
            _, teacher = client.reference_forward(x)
            return distillation_with_exact_zero(client.logits(x), teacher, self.tau)

        return client.grad(x, y, at=at, loss=loss)  # (5)

    def perturbation(self, client: Client, g_p: Tensor, adaptive: bool = True) -> Tensor:
        """Return the perturbation eps (d,) of (6) for the gradient g_p (d,); it is 0 outside the perturbed tensors."""
        g, strength = torch.zeros_like(g_p), torch.zeros_like(g_p)
        for tensors in self._perturbed_layers(client):
            changes = [s.view(client.w) - s.view(client.w0) for s in tensors]
            layer_norm = torch.stack([m.norm() for m in changes]).norm().clamp(min=1e-12)
            for s, m in zip(tensors, changes, strict=True):
                s.view(g).copy_(s.view(g_p))
                share = m.abs() / layer_norm if self.norm == "layer" else normalized_magnitude(m, self.norm)
                s.view(strength).copy_(share if self.adaptive and adaptive else torch.ones_like(m))  # (7)
        return scale_perturbation(g, self.rho, strength)  # (6)

    def _perturbed_layers(self, client: Client) -> list[list[Segment]]:
        """Return the perturbed tensors by layer; the names of a layer's tensors differ in their last part only."""
        chosen = [s for s in client.segments() if self.layers == "all" or (s.group == HEAD) == (self.layers == "head")]
        return [list(tensors) for _, tensors in groupby(chosen, key=lambda s: s.name.rpartition(".")[0])]
