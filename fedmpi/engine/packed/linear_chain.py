"""Models that are linear layers with pointwise functions between them, n clients at a time: batched matrix products.

    y = x W' + b        x (n, B, i), W (n, o, i), b (n, o) -> (n, B, o)
Backward, a layer's gradient g' x goes straight to where it is wanted: into w itself, where nobody asks for gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedmpi.engine.packed.low_rank import LowRankWeights
from fedmpi.models.mlp import layers_of


class GradientSink(Protocol):
    """Where gradients go."""

    def move(self, i: int, g: Tensor) -> None: ...

    def move_by_product(self, i: int, a: Tensor, b: Tensor) -> None: ...


class LinearChain:
    """What `forward` goes through."""

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str], module: nn.Module) -> None:
        """names: of the tensors in the stack, in order."""
        places = {id(p): names.index(name) for name, p in module.named_parameters() if name in names}
        self.steps: list[tuple[nn.Module, int, int]] = []  # layer, places of its weight and bias (-1: there is none)
        for layer in layers:
            weight, bias = (places.get(id(getattr(layer, name, None)), -1) for name in ("weight", "bias"))
            self.steps.append((layer, weight, bias) if isinstance(layer, nn.Linear) else (layer, -1, -1))

    @staticmethod
    def of(module: nn.Module, names: Sequence[str]) -> LinearChain | None:
        """None for other models; a layer that stands in two places is one, too, and one that is frozen."""
        layers = layers_of(module)
        linear = [layer for layer in layers or () if isinstance(layer, nn.Linear)]
        weights = [id(p) for layer in linear for p in layer.parameters()]
        known = {id(p) for name, p in module.named_parameters() if name in names}
        if not layers or layers[-1] not in linear or len({*weights}) < len(weights) or not known.issuperset(weights):
            return None
        return LinearChain(layers, names, module)

    def forward(
        self, leaves: Sequence[Tensor], x: Tensor, sink: GradientSink, thin: Mapping[int, LowRankWeights]
    ) -> tuple[Tensor, Tensor]:
        """z (n, B, z) and f (n, B, c) of x (n, B, ...). thin: weights in factors, which stand in for leaves."""
        z = x
        for layer, weight, bias in self.steps:
            if weight >= 0:
                b, to = leaves[bias] if bias >= 0 else None, (sink, weight, bias, thin.get(weight))
                z, x = x, _Linear.apply(x, leaves[weight], b, to)
            elif isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            else:
                x = layer(x)
        return z, x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, to: tuple[GradientSink, int, int, LowRankWeights | None]
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.to = to
        if to[3]:
            y = to[3].forward(x)
            return y if b is None else y.add_(b[:, None])
        return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b[:, None], x, w.mT)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x, w), (sink, weight, bias, thin), dx = ctx.saved_tensors, ctx.to, None
        if ctx.needs_input_grad[0]:  # before w moves
            dx = thin.backward(g) if thin else torch.bmm(g, w)
        if ctx.needs_input_grad[1]:
            sink.move_by_product(weight, g.mT, x)
        if ctx.needs_input_grad[2]:
            sink.move(bias, g.sum(1))
        return dx, None, None, None
