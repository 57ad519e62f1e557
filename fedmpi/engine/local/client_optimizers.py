"""Optimisers of the clients, with the kernels and functions of torch.optim.

The classes of torch.optim are not used, because their first step imports torch's compiler, which takes more than a
second on every rank. t counts the steps of a parameter; moments begin at 0.

    sgd       g += weight_decay w;  v = momentum v + g;  w -= lr v
              with nesterov  w -= lr (g + momentum v)
    adam      g += weight_decay w;  m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2
              w -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)                  Kingma, Ba 2015
    adamw     w -= lr weight_decay w;  then adam without weight decay              Loshchilov, Hutter 2019

With train.persist_optimizer a client keeps the state of its optimiser between rounds, in its state row:
    _optim (slots, d)      velocities or moments of each entry of w
    _optim_steps (tensors) the number of steps of each parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.flat.layout import Layout, Segment
from fedmpi.flat.packing import Views

ROWS, STEPS = "_optim", "_optim_steps"
# For each slot the parameters' tensors; the parameters' numbers of steps, () float32.
Moments = tuple[Sequence[list[Tensor]], Sequence[Tensor]]


def slots_of(config: LocalTrainingConfig) -> int:
    """Return the number of tensors that an optimiser keeps for each parameter: velocities or moments."""
    return int(bool(config.momentum)) if config.optim == "sgd" else 2


class LocalOptimizer:
    """The optimiser train.optim. Its steps do not change parameters without a gradient, nor their moments."""

    def __init__(
        self, config: LocalTrainingConfig, parameters: Sequence[nn.Parameter], lr: float, kept: Moments | None = None
    ) -> None:
        """Args:
        parameters: all on one device and of one dtype.
        kept: moments and numbers of steps of earlier rounds, which are updated in place; None: start from zero.
        """
        self.optim, self.parameters = config.optim, parameters
        self.w = [p.detach() for p in parameters]  # same memory; can be written to outside of no_grad
        self.options: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay, "maximize": False}
        if self.optim == "sgd":
            self.options |= {"momentum": config.momentum, "nesterov": config.nesterov, "dampening": 0.0}
        else:
            beta1, beta2 = config.betas
            self.options |= {"beta1": beta1, "beta2": beta2, "eps": config.eps, "amsgrad": False}
        if kept is None:
            zeros = [[torch.zeros_like(w) for w in self.w] for _ in range(slots_of(config))]
            kept = zeros, [] if self.optim == "sgd" else torch.zeros(len(self.w), device=self.w[0].device).unbind()
        self.moments, self.steps = kept
        # torch 2.13's fused SGD kernel does not update most weights of half precision on a CPU.
        self.fused = self.w[0].element_size() >= 4 or not self.w[0].is_cpu

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        gradients: list[Any] = [p.grad for p in self.parameters]
        at = [i for i, g in enumerate(gradients) if g is not None]
        if not at:
            return
        w, g, *moments = ([each[i] for i in at] for each in (self.w, gradients, *self.moments))
        if self.optim != "sgd":
            function: Any = adamw if self.optim == "adamw" else adam
            function(w, g, *moments, [], [self.steps[i] for i in at], fused=True, **self.options)
        elif self.fused:
            torch._fused_sgd_(w, g, moments[0] if moments else [], **self.options, is_first_step=False)
        else:
            velocities: list[Any] = moments[0] if moments else [None] * len(at)
            sgd(w, g, velocities, foreach=True, **self.options)


def state_shapes(config: LocalTrainingConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the optimiser's slots in a client's state row; {} without train.persist_optimizer."""
    return {ROWS: (slots_of(config), layout.size), STEPS: (len(layout.segments),)} if config.keep else {}


class OptimizerState:
    """A copy of the optimiser state in a client's state row, for one round. `steps` is float32, as torch requires."""

    def __init__(self, state: Views, layout: Layout) -> None:
        self.rows = getattr(state, ROWS).clone()
        self.steps = getattr(state, STEPS).to(torch.float32, copy=True)
        self.places = {s.name: i for i, s in enumerate(layout.segments)}

    def state(self) -> dict[str, Tensor]:
        """Return the new values of the optimiser's slots in the state row."""
        return {ROWS: self.rows, STEPS: self.steps.to(self.rows.dtype)}

    def of(self, segments: Sequence[Segment]) -> Moments:
        """Return views of the state of these segments: for each slot their tensors; their numbers of steps ()."""
        rows = [[s.view(row) for s in segments] for row in self.rows]
        return rows, [self.steps[self.places[s.name]] for s in segments]
