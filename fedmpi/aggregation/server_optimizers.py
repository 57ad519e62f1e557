"""Server optimisers, w <- w + server_optim(direction), which work with every method and every server rule.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021. Algorithm 2.

D is the direction of the server step.

    sgd       w += lr D
    momentum  m = beta1 m + D;                                                     w += lr m
              nesterov (Sutskever et al. 2013, as in torch.optim.SGD):             w += lr (D + beta1 m)
    adagrad   m = beta1 m + (1-beta1) D;   v += D^2;                               w += lr m / (sqrt v + eps)
    yogi      m as adagrad;                v -= (1-beta2) D^2 sgn(v - D^2);        w as adagrad
    adam      m as adagrad;                v  = beta2 v + (1-beta2) D^2;           w as adagrad

As in the paper, there is no bias correction and v_0 = eps^2. All operations are elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ServerOptimizer:
    """A server optimiser. The rows of `state` are its moments m and v (sgd has none, momentum only m)."""

    def __init__(
        self,
        name: str,
        like: Tensor,
        lr: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-3,
        nesterov: bool = False,
    ) -> None:
        """Create the optimiser.

        Args:
            name: sgd, momentum, adagrad, yogi or adam.
            like: a vector with the size, type and device of the global model.
            lr, beta1, beta2, eps: the constants in the formulas of the module docstring.
            nesterov: whether momentum uses Nesterov's variant.
        """
        self.name, self.lr, self.beta1, self.beta2, self.eps, self.nesterov = name, lr, beta1, beta2, eps, nesterov
        slots = {"sgd": 0, "momentum": 1}.get(name, 2)
        self.state = torch.zeros(slots, *like.shape, dtype=like.dtype, device=like.device)
        if slots == 2:
            self.state[1].fill_(eps**2)

    def step(self, w: Tensor, direction: Tensor, state: Tensor) -> None:
        """Take one step along `direction` (n,): update w (n,) and `state`, the moments (slots, n), in place."""
        if self.name == "sgd":
            w.add_(direction, alpha=self.lr)
            return
        if self.name == "momentum":
            m = state[0].mul_(self.beta1).add_(direction)
            if self.nesterov:
                w.add_(direction, alpha=self.lr).add_(m, alpha=self.lr * self.beta1)
            else:
                w.add_(m, alpha=self.lr)
            return
        m, v = state
        m.mul_(self.beta1).add_(direction, alpha=1 - self.beta1)
        square = direction.square()
        if self.name == "adagrad":
            v.add_(square)
        elif self.name == "yogi":
            v.sub_((v - square).sign_().mul_(square), alpha=1 - self.beta2)
        else:
            v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)
        w.addcdiv_(m, v.sqrt().add_(self.eps), value=self.lr)
