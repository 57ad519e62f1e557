"""The optimisers of the clients, which call the functional implementations of torch.optim.

The classes of torch.optim are not used, because their first step imports torch's compiler, which takes more than a
second on every rank. In the formulas, g is the gradient of a parameter w, t is the number of steps that have updated w,
and b1 and b2 are the betas. The velocity v and the moments m and v are initially 0.

    sgd       g += weight_decay w;  v = momentum v + g;  w -= lr v
              with nesterov:  w -= lr (g + momentum v)
    adam      g += weight_decay w;  m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2
              w -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)                  Kingma, Ba 2015
    adamw     w -= lr weight_decay w;  then adam without weight decay              Loshchilov, Hutter 2019

With train.persist_optimizer, a client keeps the state of its optimiser between rounds, in two slots of its state row:
    _optim (slots, d)      velocity or moments of each entry of w
    _optim_steps (tensors) the number of steps of each parameter tensor
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

MOMENTS_SLOT, STEPS_SLOT = "_optim", "_optim_steps"
# The tensors of all parameters for each kind of moment; the number of steps of each parameter, () float32.
Moments = tuple[Sequence[list[Tensor]], Sequence[Tensor]]


def num_optimizer_slots(config: LocalTrainingConfig) -> int:
    """Return how many state tensors (velocity or moments) the optimiser keeps for each parameter."""
    return int(bool(config.momentum)) if config.optim == "sgd" else 2


class LocalOptimizer:
    """The local optimiser that train.optim selects.

    Parameters without a gradient, and their moments, do not change in a step.
    """

    def __init__(
        self, config: LocalTrainingConfig, parameters: Sequence[nn.Parameter], lr: float, state: Moments | None = None
    ) -> None:
        """Create the optimiser.

        Args:
            parameters: the trained parameters, all on one device and of one dtype.
            state: moments and step counts from earlier rounds, which are updated in place; None: start from zero.
        """
        self.optim, self.parameters = config.optim, parameters
        self.w = [p.detach() for p in parameters]  # shares memory with the parameters; writable outside of no_grad
        self.options: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay, "maximize": False}
        if self.optim == "sgd":
            self.options |= {"momentum": config.momentum, "nesterov": config.nesterov, "dampening": 0.0}
        else:
            beta1, beta2 = config.betas
            self.options |= {"beta1": beta1, "beta2": beta2, "eps": config.eps, "amsgrad": False}
        if state is None:
            zeros = [[torch.zeros_like(w) for w in self.w] for _ in range(num_optimizer_slots(config))]
            state = zeros, [] if self.optim == "sgd" else torch.zeros(len(self.w), device=self.w[0].device).unbind()
        self.moments, self.steps = state
        # torch 2.13's fused SGD kernel does not update most weights of half precision on a CPU.
        self.fused = self.w[0].element_size() >= 4 or not self.w[0].is_cpu

    def step(self) -> None:
        """Take one step: update the parameters that have a gradient."""
        gradients: list[Any] = [p.grad for p in self.parameters]
        active = [i for i, g in enumerate(gradients) if g is not None]
        if not active:
            return
        w, g, *moments = ([each[i] for i in active] for each in (self.w, gradients, *self.moments))
        if self.optim != "sgd":
            function: Any = adamw if self.optim == "adamw" else adam
            function(w, g, *moments, [], [self.steps[i] for i in active], fused=True, **self.options)
        elif self.fused:
            torch._fused_sgd_(w, g, moments[0] if moments else [], **self.options, is_first_step=False)
        else:
            velocities: list[Any] = moments[0] if moments else [None] * len(active)
            sgd(w, g, velocities, foreach=True, **self.options)


def optimizer_slot_shapes(config: LocalTrainingConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the optimiser's slots in a client's state row; {} without train.persist_optimizer."""
    return (
        {MOMENTS_SLOT: (num_optimizer_slots(config), layout.size), STEPS_SLOT: (len(layout.segments),)}
        if config.persist_optimizer
        else {}
    )


class OptimizerState:
    """A copy of the optimiser state in a client's state row, for one round.

    The step counts `steps` are float32, as torch requires.
    """

    def __init__(self, state: Views, layout: Layout) -> None:
        self.rows = getattr(state, MOMENTS_SLOT).clone()
        self.steps = getattr(state, STEPS_SLOT).to(torch.float32, copy=True)
        self.positions = {s.name: i for i, s in enumerate(layout.segments)}

    def to_slots(self) -> dict[str, Tensor]:
        """Return the optimiser's current state as values of its slots in the client's state row."""
        return {MOMENTS_SLOT: self.rows, STEPS_SLOT: self.steps.to(self.rows.dtype)}

    def views(self, segments: Sequence[Segment]) -> Moments:
        """Return views of the moments and step counts of the given parameter tensors."""
        rows = [[s.view(row) for s in segments] for row in self.rows]
        return rows, [self.steps[self.positions[s.name]] for s in segments]
