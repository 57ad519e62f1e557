"""The clients' optimiser. torch.optim.SGD, whose kernel this is, imports torch's compiler at its first step: more than
a second on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SGD:
    """g <- g + weight_decay w,  v <- momentum v + g,  w <- w - lr v,  where v begins as the first g.

    parameters: of one device and type. One without a gradient stays as it is, and so does its v.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.v: dict[nn.Parameter, Tensor] = {}

    def forget(self) -> None:
        """The gradients of the step before; autograd allocates those of the next one."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        moved = [(p, p.grad) for p in self.parameters if p.grad is not None]
        new = {p for p, _ in moved if p not in self.v} if self.momentum else set()
        if not new:
            self._move(moved, begins=False)
            return
        self.v.update((p, torch.empty_like(p)) for p in new)
        for begins in (True, False):
            self._move([(p, g) for p, g in moved if (p in new) == begins], begins)

    def _move(self, moved: list[tuple[nn.Parameter, Tensor]], begins: bool) -> None:
        if moved:
            torch._fused_sgd_(
                [p for p, _ in moved],
                [g for _, g in moved],
                [self.v[p] for p, _ in moved] if self.momentum else [],
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=begins,
            )
