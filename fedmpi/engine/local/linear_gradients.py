"""The sum of the clipped gradients of samples for models whose parameters all belong to linear layers.

For a linear layer z = W a + b with inputs a_i and the gradients d_i = dL_i/dz_i of the losses of the samples,

    ||dL_i/d(W, b)||^2 = ||d_i||^2 (||a_i||^2 + 1),        sum_i c_i dL_i/dW = sum_i c_i d_i a_i'

so that one forward and one backward pass give the norms, and no gradient of a single sample is formed (Goodfellow.
Efficient Per-Example Gradient Computations. 2015. https://arxiv.org/abs/1510.01799).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.method.base import Method, overrides
from fedmpi.models.mlp import MLP, POINTWISE_LAYERS, ReferenceClassHead
from fedmpi.tasks.classification import Classification
from fedmpi.tasks.regression import Regression

# Factor of the clip norm that makes up for the rounding of the scaled entries to float32.
ROUNDING_MARGIN = 1 - 2.0**-22
# Modules that compute the output of a sample from that sample alone.
KNOWN_MODULES = (MLP, nn.Sequential, ReferenceClassHead, *POINTWISE_LAYERS, nn.Linear, nn.Flatten, nn.Dropout)


class LinearGradients:
    """Computes the sum of the clipped gradients of a batch; see the module docstring."""

    def __init__(self, trainer: ClientTrainer, parameters: Sequence[nn.Parameter]) -> None:
        """Create the computation for the parameters that are trained."""
        self.trainer = trainer
        trained = {*map(id, parameters)}
        segments = {id(p): segment for segment, p in trainer.model.segment_parameters if id(p) in trained}
        layers = [layer for layer in trainer.model.module.modules() if isinstance(layer, nn.Linear)]
        positions = [(layer, segments.get(id(layer.weight)), segments.get(id(layer.bias))) for layer in layers]
        self.layers = [each for each in positions if each[1] or each[2]]

    @staticmethod
    def create(trainer: ClientTrainer, method: Method, parameters: Sequence[nn.Parameter]) -> LinearGradients | None:
        """Return the computation, or None unless the model consists of linear layers on vectors and known functions.

        The loss must be one of those that are known to be a mean over samples.
        """
        modules = list(trainer.model.module.modules())
        weights = [p for part in modules if isinstance(part, nn.Linear) for p in part.parameters()]
        is_supported = (
            all(type(part) in KNOWN_MODULES and not getattr(part, "inplace", False) for part in modules)
            and not any(part._forward_hooks or part._forward_pre_hooks for part in modules)
            and len({*map(id, weights)}) == len(weights) == len(trainer.model.parameters)
            and (len(trainer.data.input_shape) == 1 or any(type(part) is nn.Flatten for part in modules))
            and not overrides(method, "loss")
            and not trainer.bf16
            and type(trainer.task).loss in (Classification.loss, Regression.loss)
        )
        return LinearGradients(trainer, parameters) if is_supported else None

    def sum_clipped(self, x: Tensor, y: Tensor, clip: float) -> Tensor:
        """Return the sum of the clipped gradients of a batch, (d,), which is 0 for parameters that are not trained.

        Args:
            x: the samples, (B, ...) with B > 0.
            y: the targets, (B, ...).
            clip: the clip norm.
        """
        model = self.trainer.model
        inputs, outputs = list[Tensor](), list[Tensor]()

        def record(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs.append(arguments[0].detach())
            outputs.append(output)

        hooks = [layer.register_forward_hook(record) for layer, _, _ in self.layers]
        try:
            loss = self.trainer.task.loss(model.module, x, y)
        finally:
            for hook in hooks:
                hook.remove()
        # The loss of a batch is the mean over samples, or the weighted mean if the task weights samples.
        gradients = torch.autograd.grad(loss * self.trainer.task.loss_weight(y), outputs)
        squares = torch.zeros(len(y), dtype=torch.float64, device=x.device)
        for (_, weight, bias), a, d in zip(self.layers, inputs, gradients, strict=True):
            factor = a.double().square().sum(1) if weight else torch.zeros_like(squares)
            squares += d.double().square().sum(1) * (factor + 1 if bias else factor)
        factors, total = norm_factors(squares.sqrt(), clip).to(x.dtype)[:, None], torch.zeros_like(model.w)
        for (_, weight, bias), a, d in zip(self.layers, inputs, gradients, strict=True):
            # A sample whose gradient is not finite has the factor 0; 0 times nan would be nan.
            scaled = torch.where(factors > 0, d * factors, 0)
            if weight:
                torch.mm(scaled.t(), torch.where(factors > 0, a, 0), out=weight.view(total))
            if bias:
                torch.sum(scaled, 0, out=bias.view(total))
        return total


def norm_factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factors min(1, clip / norm) for norms (B,) float64; 0 for norms that are not finite."""
    factors = torch.where(norms > clip, ROUNDING_MARGIN * clip / norms, 1.0)
    return torch.where(norms.isfinite(), factors, 0.0)
