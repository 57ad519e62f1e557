"""The clients' optimiser. torch.optim.SGD, whose kernel this is, imports torch's compiler at its first step: more than
a second on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class SGD:
    """g <- g + weight_decay w,  v <- momentum v + g,  w <- w - lr v,  where v begins as the first g.

    parameters: of one device and type. One without a gradient stays as it is, and so does its v.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.w = [p.detach() for p in parameters]  # the same memory, which may be written to without no_grad
        self.v: list[Any] = [None] * len(parameters)  # made when a gradient first comes

    def forget(self) -> None:
        """The gradients of the step before; autograd allocates those of the next one."""
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        g = [p.grad for p in self.parameters]
        moved = [i for i, each in enumerate(g) if each is not None]
        new = [i for i in moved if self.v[i] is None] if self.momentum else []
        if not new:
            self._move(moved, g, begins=False)
            return
        old = [i for i in moved if self.v[i] is not None]
        for i in new:
            self.v[i] = torch.empty_like(self.w[i])
        self._move(new, g, begins=True)
        self._move(old, g, begins=False)

    def _move(self, moved: list[int], g: list[Any], begins: bool) -> None:
        if moved:
            torch._fused_sgd_(
                [self.w[i] for i in moved],
                [g[i] for i in moved],
                [self.v[i] for i in moved] if self.momentum else [],
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=begins,
            )
