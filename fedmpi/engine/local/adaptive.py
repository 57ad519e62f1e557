"""Optimisers of the clients whose steps are scaled entry by entry: the formulas of torch.optim, without its classes
(sgd.py says why). t counts the steps of a parameter; moments begin at 0.

    adam      g += weight_decay w;  m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2
              w -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)                  Kingma, Ba 2015
    adamw     w -= lr weight_decay w;  then adam without weight decay              Loshchilov, Hutter 2019
    rmsprop   g += weight_decay w;  v = alpha v + (1-alpha) g^2;  u = g / (sqrt v + eps)
              w -= lr u, or with momentum  m = momentum m + u,  w -= lr m          Tieleman, Hinton 2012
    adagrad   g += weight_decay w;  v += g^2;  w -= lr g / (sqrt v + eps)          Duchi, Hazan, Singer 2011
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.engine.local.recipe import Recipe
from fedmpi.engine.local.sgd import SGD

Tensors = list[Tensor]
Moments = tuple[Sequence[Tensors], Sequence[Tensor]]  # slot by slot the parameters' tensors; their steps, () float32


class Adaptive:
    """parameters: of one device and type. One without a gradient stays as it is, and so does what is known of it."""

    def __init__(self, how: Recipe, parameters: Sequence[nn.Parameter], lr: float, kept: Moments | None = None) -> None:
        """kept: moments and steps of earlier rounds, which go on in place."""
        self.how, self.parameters, self.lr = how, parameters, lr
        self.w = [p.detach() for p in parameters]
        slots = 2 if how.optim in ("adam", "adamw") or (how.optim == "rmsprop" and how.momentum) else 1
        fresh = [[torch.zeros_like(w) for w in self.w] for _ in range(slots if kept is None else 0)]
        steps = torch.zeros(len(self.w), device=self.w[0].device).unbind() if kept is None else ()
        self.moments, self.steps = (fresh, steps) if kept is None else kept
        self._move = {"adam": self._adam, "adamw": self._adam, "rmsprop": self._rmsprop, "adagrad": self._adagrad}[
            how.optim
        ]

    def forget(self) -> None:
        """The gradients of the step before; autograd allocates those of the next one."""
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        g = [p.grad for p in self.parameters]
        at = [i for i, each in enumerate(g) if each is not None]
        if at:
            steps = [self.steps[i] for i in at]
            torch._foreach_add_(steps, 1)
            moments = [[slot[i] for i in at] for slot in self.moments]
            self._move([self.w[i] for i in at], [g[i] for i in at], moments, steps)  # type: ignore[misc]

    def _adam(self, w: Tensors, g: Tensors, moments: Sequence[Tensors], steps: Tensors) -> None:
        m, v = moments
        (beta1, beta2), how = self.how.betas, self.how
        kernel: Any = torch._fused_adamw_ if how.optim == "adamw" else torch._fused_adam_
        rates = {"lr": self.lr, "beta1": beta1, "beta2": beta2, "weight_decay": how.weight_decay, "eps": how.eps}
        kernel(w, g, m, v, [], steps, **rates, amsgrad=False, maximize=False)

    def _rmsprop(self, w: Tensors, g: Tensors, moments: Sequence[Tensors], steps: Tensors) -> None:
        v, how, g = moments[0], self.how, self._decayed(w, g)
        torch._foreach_mul_(v, how.alpha)
        torch._foreach_addcmul_(v, g, g, value=1 - how.alpha)
        root = torch._foreach_sqrt(v)
        torch._foreach_add_(root, how.eps)
        if not how.momentum:
            torch._foreach_addcdiv_(w, g, root, value=-self.lr)
            return
        torch._foreach_mul_(moments[1], how.momentum)
        torch._foreach_addcdiv_(moments[1], g, root)
        torch._foreach_add_(w, moments[1], alpha=-self.lr)

    def _adagrad(self, w: Tensors, g: Tensors, moments: Sequence[Tensors], steps: Tensors) -> None:
        v, g = moments[0], self._decayed(w, g)
        torch._foreach_addcmul_(v, g, g, value=1)
        root = torch._foreach_sqrt(v)
        torch._foreach_add_(root, self.how.eps)
        torch._foreach_addcdiv_(w, g, root, value=-self.lr)

    def _decayed(self, w: Tensors, g: Tensors) -> Tensors:
        decay = self.how.weight_decay
        return list(torch._foreach_add(g, w, alpha=decay)) if decay else g


def make(how: Recipe, parameters: Sequence[nn.Parameter], lr: float, kept: Moments | None = None) -> SGD | Adaptive:
    """The optimiser of one fit."""
    if how.optim != "sgd":
        return Adaptive(how, parameters, lr, kept)
    velocities = None if kept is None else (kept[0][0], kept[1])
    return SGD(parameters, lr, how.momentum, how.weight_decay, how.dampening, how.nesterov, velocities)
