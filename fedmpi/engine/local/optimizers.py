"""Optimisers of the clients: the formulas of torch.optim without its classes, whose first step takes more than a second
on every rank, as it imports torch's compiler. t counts the steps of a parameter; moments begin at 0.

    sgd       g += weight_decay w;  v = momentum v + (1 - dampening) g, at first v = g;  w -= lr v
              with nesterov  w -= lr (g + momentum v)
    adam      g += weight_decay w;  m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2
              w -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)                  Kingma, Ba 2015
    adamw     w -= lr weight_decay w;  then adam without weight decay              Loshchilov, Hutter 2019
    rmsprop   g += weight_decay w;  v = alpha v + (1-alpha) g^2;  u = g / (sqrt v + eps)
              w -= lr u, or with momentum  m = momentum m + u,  w -= lr m          Tieleman, Hinton 2012
    adagrad   g += weight_decay w;  v += g^2;  w -= lr g / (sqrt v + eps)          Duchi, Hazan, Singer 2011

With train.keep_optim a client keeps the state of its optimiser from round to round, in its state row:
    _optim (slots, d)      velocities or moments, entry for entry those of w
    _optim_steps (tensors) the steps that each parameter has made
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.engine.local.recipe import Recipe
from fedmpi.flat.layout import Layout, Segment
from fedmpi.flat.packing import Views

ROWS, STEPS = "_optim", "_optim_steps"
Tensors = list[Tensor]
Moments = tuple[Sequence[Tensors], Sequence[Tensor]]  # slot by slot the parameters' tensors; their steps, () float32


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

    def zero_grad(self) -> None:
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

    def zero_grad(self) -> None:
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


def state_shapes(how: Recipe, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Of the slots in a client's row; none where nothing is kept."""
    if not how.keep:
        return {}
    slots = {"sgd": 1, "rmsprop": 2 if how.momentum else 1, "adagrad": 1}.get(how.optim, 2)
    return {ROWS: (slots, layout.size), STEPS: (len(layout.segments),)}


class OptimizerState:
    """A copy of it for one round; `steps` in float32, as torch's kernels want them."""

    def __init__(self, state: Views, layout: Layout) -> None:
        self.rows = getattr(state, ROWS).clone()
        self.steps = getattr(state, STEPS).to(torch.float32, copy=True)
        self.places = {s.name: i for i, s in enumerate(layout.segments)}

    def state(self) -> dict[str, Tensor]:
        """What the row is to hold from now on."""
        return {ROWS: self.rows, STEPS: self.steps.to(self.rows.dtype)}

    def of(self, segments: Sequence[Segment]) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Views: slot by slot the tensors of these segments, and their steps ()."""
        rows = [[s.view(row) for s in segments] for row in self.rows]
        return rows, [self.steps[self.places[s.name]] for s in segments]
