"""A model whose features are Gaussian random variables, for FedSR. The model must end in a linear layer.

FedSR. Nguyen, Torr, Lim. A Simple and Effective Domain Generalization Method for Federated Learning. NeurIPS 2022.
https://openreview.net/forum?id=mrt90D00aQX

    (mu, s) = A h(x) + a,   sigma = softplus(s),   z ~ N(mu, sigma^2)         h: input of the last linear layer      (1)
    r(z|c) = N(r_mu[c], softplus(r_sigma[c])^2)                                                                      (2)
    KL_c   = sum over dims of KL( N(C mu, (C sigma)^2) || r(.|c) )                                                   (3)
A is a linear layer without an activation, inserted before the last one. r_mu, r_sigma and the number C are learned. In
evaluation mode z = mu.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedmpi.common.inputs import Samples, call_module

REFERENCE_GROUP = "reference"  # layout group of r_mu, r_sigma, C


class LinearOnFirstColumns(nn.Module):
    """A linear layer that uses only the first columns of its input, the features z; the others are KL divergences."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, : self.layer.in_features])


class GaussianFeatures(nn.Module):
    """A model with Gaussian features: `module` with the layer of equation (1) before its last linear layer.

    In training mode features(x) = [z | KL_1 ... KL_c], (B, k + c) for k features and c classes: the divergences are
    returned with the features, so that a loss needs only one forward pass. The logits are head(z), (B, c).
    """

    def __init__(self, module: nn.Module, classes: int) -> None:
        super().__init__()
        path, last = [(n, layer) for n, layer in module.named_modules() if isinstance(layer, nn.Linear)][-1]
        parent, _, name = path.rpartition(".")
        if path:
            setattr(module.get_submodule(parent), name, nn.Identity())
        width = last.in_features
        self.body = module if path else nn.Identity()
        self.encode = nn.Linear(width, 2 * width)
        self.r_mu, self.r_sigma = nn.Parameter(torch.zeros(classes, width)), nn.Parameter(torch.ones(classes, width))
        self.C = nn.Parameter(torch.ones(()))
        self.head = LinearOnFirstColumns(last)

    def parameter_groups(self) -> dict[str, str]:
        inner: dict[str, str] = getattr(self.body, "parameter_groups", dict)()
        named = {f"body.{name}": group for name, group in inner.items()}
        return named | dict.fromkeys(("r_mu", "r_sigma", "C"), REFERENCE_GROUP)

    def features(self, x: Samples) -> Tensor:
        mu, s = self.encode(call_module(self.body, x)).chunk(2, 1)
        sigma = softplus(s)
        if not self.training:
            return mu
        z = mu + sigma * torch.randn_like(mu)  # (1)
        return torch.cat([z, self.kl_divergences(self.C * mu, (self.C * sigma).abs())], 1)

    def kl_divergences(self, mu: Tensor, sigma: Tensor) -> Tensor:
        """Return the KL divergences (3) of N(mu, sigma^2) from r(.|c) of each class, (B, c); mu is (B, k)."""
        with torch.autocast(mu.device.type, enabled=False):  # bf16 is too inexact for differences of large sums
            mu, sigma = mu.to(self.r_mu.dtype), sigma.to(self.r_mu.dtype)
            r = softplus(self.r_sigma)  # (c, k)  (2)
            half_precision = r.square().reciprocal() / 2
            # sum over dims of (sigma^2 + (mu - r_mu)^2) / 2 r^2 as matrix products, without a tensor of size B c k
            squared_norms = (sigma.square() + mu.square()) @ half_precision.T
            distance = (
                squared_norms - 2 * mu @ (self.r_mu * half_precision).T + (self.r_mu.square() * half_precision).sum(1)
            )
            return r.log().sum(1) - sigma.log().sum(1, keepdim=True) + distance - mu.shape[1] / 2

    def forward(self, x: Samples) -> Tensor:
        return self.head(self.features(x))
