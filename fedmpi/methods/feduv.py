"""FedUV: two terms of the loss spread the features of a batch (U) and its predicted probabilities over the classes (V).

Son, Kim, Chung, Huang, Liu. Uniformity and Variance for Heterogeneous Federated Learning. CVPR 2024.
https://arxiv.org/abs/2402.18372

L = CE + mu U(z) + lam V(softmax f)                                                                          (1)
U = mean_{i<j} exp(-||z_i - z_j||^2 / sigma),   sigma = median of the non-zero squared distances             (2)
V = mean_c h(1/sqrt(C) - std_b P_bc)            h(t) = max(t, 0); P = softmax f; the std is unbiased         (3)
z is the input of the head. 1/sqrt(C) is the std of one-hot P for C equally frequent classes. U and V of a batch of one
sample are 0. Table 6 of the paper compares h(t) = t (hinge: none) and t^2 (hinge: squared). As in the authors' code,
the gradient also flows through sigma, unless detach_sigma: true.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pdist

from fedmpi.method import CLASSES, FEATURES, Client, Method, declared_property, option


@dataclass(frozen=True)
class FedUV(Method):
    """FedUV: FedAvg with uniformity and variance terms in the loss."""

    mu: float = option(0.5, "weight of the uniformity U", ge=0)
    lam: float | None = option(None, "weight of the variance term V; null: a quarter of the classes", ge=0)
    detach_sigma: bool = option(False, "treat sigma in (2) as a constant")
    hinge: str = option("linear", "h of (3)", choices=("linear", "none", "squared"))

    needs = frozenset({FEATURES, CLASSES})
    equals_fedavg_at = {"mu": 0.0, "lam": 0.0}

    @declared_property
    def loss_is_sample_mean(self) -> bool:
        return not self.mu and self.lam == 0  # otherwise the loss has statistics of the batch

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = client.forward(x)
        loss = client.task_loss(f, x, y)
        lam = client.classes / 4 if self.lam is None else self.lam
        if self.mu:
            loss = loss + self.mu * uniformity(z, self.detach_sigma)
        return loss + lam * variance_term(f.softmax(1), self.hinge) if lam else loss  # (1)


def uniformity(z: Tensor, detach_sigma: bool = False) -> Tensor:
    """Return the uniformity U (), Eq. (2), of features z (B, z); it is 1 if all features are equal.

    >>> round(uniformity(torch.tensor([[0.0, 0], [1, 0], [0, 2]])).item(), 5)  # distances 1, 4, 5
    0.47773
    """
    d = pdist(z).square()  # (B (B - 1) / 2,)
    if not len(d):
        return z.new_zeros(())
    sigma = torch.where(d > 0, d, torch.nan).nanmedian()  # the lower of the two middle values if their number is even
    sigma = torch.where(sigma > 0, sigma, 1.0)  # all d are 0: any sigma makes U 1
    return (-d / (sigma.detach() if detach_sigma else sigma)).exp().mean()  # (2)


def variance_term(P: Tensor, hinge: str = "linear") -> Tensor:
    """Return the variance term V (), Eq. (3), of predicted probabilities P (B, c)."""
    if len(P) < 2:
        return P.new_zeros(())
    deficit = P.shape[1] ** -0.5 - P.std(0)
    if hinge == "squared":
        return deficit.square().mean()
    return (deficit.clamp(min=0) if hinge == "linear" else deficit).mean()  # (3)
