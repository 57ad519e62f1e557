"""SGD of the clients. torch.optim.SGD, whose kernel this is, imports torch's compiler at its first step: more than
a second on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SGD:
    """g <- g + weight_decay w,  v <- momentum v + (1 - dampening) g,  w <- w - lr v,  where v begins as the first g.

    nesterov: w <- w - lr (g + momentum v).
    parameters: of one device and type. One without a gradient stays as it is, and so does its v.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        dampening: float = 0.0,
        nesterov: bool = False,
        kept: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        """kept: velocities and steps () of earlier rounds, which go on in place."""
        self.parameters = parameters
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.dampening, self.nesterov, self.kept = dampening, nesterov, kept
        self.w = [p.detach() for p in parameters]  # the same memory, which may be written to without no_grad
        self.v: list[Any] = [None] * len(parameters)  # made when a gradient first comes
        if kept is not None and dampening:  # the first gradient is not dampened: one question to the device
            begun = torch.stack([*kept[1]]).tolist()
            self.v = [v if steps else None for v, steps in zip(kept[0], begun, strict=True)]
        elif kept is not None:  # else a velocity of 0 becomes the first gradient by the rule for all
            self.v = [*kept[0]]
            for steps in kept[1]:
                steps.fill_(1)

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
            if self.kept is None:
                self.v[i] = torch.empty_like(self.w[i])
            else:
                self.v[i] = self.kept[0][i]
                self.kept[1][i].fill_(1)
        self._move(new, g, begins=True)
        self._move(old, g, begins=False)

    def _move(self, moved: list[int], g: list[Any], begins: bool) -> None:
        w, v = self.w, self.v
        if len(moved) < len(g):
            w, g, v = ([each[i] for i in moved] for each in (w, g, v))
        if moved and w[0].is_cpu and w[0].element_size() < 4:
            self._in_turn(w, g, v, begins)
        elif moved:
            torch._fused_sgd_(
                w,
                g,
                v if self.momentum else [],
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=self.dampening,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=begins,
            )

    def _in_turn(self, w: Any, g: Any, v: Any, begins: bool) -> None:
        """The same in half precision on a CPU, where the fused kernel of torch 2.13 leaves most weights as they are."""
        if self.weight_decay:
            g = torch._foreach_add(g, w, alpha=self.weight_decay)
        if self.momentum and begins:
            torch._foreach_copy_(v, g)
        elif self.momentum:
            torch._foreach_mul_(v, self.momentum)
            torch._foreach_add_(v, g, alpha=1 - self.dampening)
        along = torch._foreach_add(g, v, alpha=self.momentum) if self.nesterov else v if self.momentum else g
        torch._foreach_add_(w, along, alpha=-self.lr)
