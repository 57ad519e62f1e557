"""Optimisers of the clients: the kernels and functions of torch.optim without its classes, whose first step imports
torch's compiler, which takes more than a second on every rank. t counts the steps of a parameter; moments begin at 0.

    sgd       g += weight_decay w;  v = momentum v + g;  w -= lr v
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
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.flat.layout import Layout, Segment
from fedmpi.flat.packing import Views

ROWS, STEPS = "_optim", "_optim_steps"
# Slot by slot the parameters' tensors; their steps, () float32.
Moments = tuple[Sequence[list[Tensor]], Sequence[Tensor]]


# What the functions of torch.optim take beside lr and weight_decay: options of the config, and what is always the same.
TAKES: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "sgd": (("momentum", "nesterov"), {"dampening": 0.0, "maximize": False}),
    "adam": (("eps",), {"amsgrad": False, "maximize": False}),
    "adamw": (("eps",), {"amsgrad": False, "maximize": False}),
    "rmsprop": (("eps", "alpha", "momentum"), {"centered": False}),
    "adagrad": (("eps",), {"lr_decay": 0.0, "maximize": False}),
}


def slots_of(config: LocalTrainingConfig) -> int:
    """Return how many tensors of a parameter's shape an optimiser keeps for it: velocities or moments."""
    if config.optim in ("sgd", "rmsprop"):
        return int(config.optim == "rmsprop") + bool(config.momentum)
    return 1 if config.optim == "adagrad" else 2


class LocalOptimizer:
    """Steps of train.optim. A parameter without a gradient stays as it is, and so does what is known of it."""

    def __init__(
        self, config: LocalTrainingConfig, parameters: Sequence[nn.Parameter], lr: float, kept: Moments | None = None
    ) -> None:
        """parameters: of one device and type; kept: moments and steps of earlier rounds, which go on in place."""
        self.config, self.parameters = config, parameters
        self.w = [p.detach() for p in parameters]  # the same memory, which may be written to without no_grad
        options, fixed = TAKES[config.optim]
        self.rates: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay, **fixed}
        self.rates |= {name: getattr(config, name) for name in options}
        self.steps: Sequence[Tensor] = ()
        if kept is not None:
            self.moments, self.steps = kept
        else:
            self.moments = [[torch.zeros_like(w) for w in self.w] for _ in range(slots_of(config))]
            if config.optim != "sgd":
                self.steps = torch.zeros(len(self.w), device=self.w[0].device).unbind()
        # torch 2.13's fused kernel of SGD leaves most weights in half precision as they are on a CPU.
        self.fused = self.w[0].element_size() >= 4 or not self.w[0].is_cpu

    def step(self) -> None:
        """Move the parameters that have a gradient."""
        gradients: list[Any] = [p.grad for p in self.parameters]
        at, config = [i for i, g in enumerate(gradients) if g is not None], self.config
        if not at:
            return
        w, g, *moments = ([each[i] for i in at] for each in (self.w, gradients, *self.moments))
        if config.optim == "sgd":
            v = moments[0] if moments else []
            if self.fused:
                torch._fused_sgd_(w, g, v, **self.rates, is_first_step=False)
            else:
                velocities: list[Any] = v or [None] * len(at)
                sgd(w, g, velocities, foreach=True, **self.rates)
            return
        steps = [self.steps[i] for i in at]
        if config.optim in ("adam", "adamw"):
            adam_ = adamw if config.optim == "adamw" else adam
            beta1, beta2 = config.betas
            adam_(w, g, moments[0], moments[1], [], steps, fused=True, beta1=beta1, beta2=beta2, **self.rates)
        elif config.optim == "rmsprop":
            velocities = moments[1] if config.momentum else []
            rmsprop(w, g, moments[0], [], velocities, steps, foreach=True, **self.rates)
        else:
            adagrad(w, g, moments[0], steps, foreach=True, **self.rates)


def state_shapes(config: LocalTrainingConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Of the slots in a client's row; none where nothing is kept."""
    if not config.keep:
        return {}
    return {ROWS: (slots_of(config), layout.size), STEPS: (len(layout.segments),)}


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
