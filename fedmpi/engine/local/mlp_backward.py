"""Loss and gradients of small models without autograd, whose overhead would exceed the cost of the arithmetic.

This applies to chains of linear layers and ReLUs with mean cross-entropy loss, on a CPU. The kernels that autograd
would call are called on the same operands and in the same order, so the results are bitwise identical.
    z_{i+1} = z_i W_i' + b_i        g_L = dL/dz_L,  dW_i = g_{i+1}' z_i,  db_i = sum_b g_{i+1},  g_i = g_{i+1} W_i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.models.mlp import list_chain_layers
from fedmpi.tasks.classification import Classification

_nll = torch.ops.aten.nll_loss_forward.default
_nll_backward = torch.ops.aten.nll_loss_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default
MEAN, IGNORED = 1, -100  # reduction and ignore_index of torch.nn.functional.cross_entropy


# weight, bias, gradient of the weight, gradient of the bias
LayerTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _layer_tensors(layer: nn.Linear) -> LayerTensors:
    """Return the weight and the bias of a linear layer, and their gradients; None for the bias if there is none."""
    w, b = layer.weight, layer.bias
    return w.detach(), None if b is None else b.detach(), w.grad, None if b is None else b.grad


class MLPBackward:
    """Computes the loss of a batch and its gradients for one chain of layers, without autograd."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        # Each gradient has its own memory: kernels sum in a different order if a tensor is not aligned to 64 bytes.
        self.gradients = [(p, torch.empty_like(p)) for layer in layers for p in layer.parameters()]
        self.layer_tensors: list[LayerTensors | None] = []  # for each layer; None for a ReLU
        self.loss_gradient = torch.ones((), dtype=next(layers[0].parameters()).dtype)  # dL/dL

    @staticmethod
    def create(module: nn.Module, task: Any, flat: bool) -> MLPBackward | None:
        """Create an MLPBackward for a model and task; return None if they are not supported.

        Args:
            task: the task; only tasks with the mean cross-entropy loss are supported.
            flat: whether samples are vectors; if they are not, the module must start with nn.Flatten.
        """
        layers = list_chain_layers(module) or []
        if layers and isinstance(layers[0], nn.Flatten):
            flat, layers = True, layers[1:]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        weights = [p for layer in linear for p in layer.parameters()]
        is_supported = (
            flat
            and len(linear) > 0
            and layers[0] is linear[0]
            and layers[-1] is linear[-1]
            and all(type(layer) in (nn.Linear, nn.ReLU) for layer in layers)
            and len({*map(id, weights)}) == len(weights)
            and all(p.is_cpu and p.requires_grad for p in weights)
            and all(part._compiled_call_impl is None for part in module.modules())
        )
        return (
            MLPBackward(layers)
            if is_supported and type(task).loss is Classification.loss and task.is_plain_cross_entropy
            else None
        )

    def attach_gradients(self) -> None:
        """Assign the gradient tensors to the parameters' .grad; must be called before the first batch of each fit()."""
        for p, g in self.gradients:
            p.grad = g
        self.layer_tensors = [_layer_tensors(layer) if isinstance(layer, nn.Linear) else None for layer in self.layers]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradients of a batch, x (B, ...) and y (B,), to the parameters' .grad; return the scalar loss."""
        z = x.flatten(1)
        inputs = [z]
        for layer in self.layer_tensors:
            z = torch.relu(z) if layer is None else functional.linear(z, layer[0], layer[1])
            inputs.append(z)
        p = torch.log_softmax(z, 1)
        loss, count = _nll(p, y, None, MEAN, IGNORED)
        g = _nll_backward(self.loss_gradient, p, y, None, MEAN, IGNORED, count)
        g = torch._log_softmax_backward_data(g, p, 1, p.dtype)
        for i in range(len(self.layer_tensors) - 1, -1, -1):
            layer = self.layer_tensors[i]
            if layer is None:
                g = _relu_backward(g, inputs[i + 1], 0)
                continue
            w, _, dw, db = layer
            torch.mm(g.t(), inputs[i], out=dw)
            if db is not None:
                torch.sum(g, 0, out=db)
            if i:
                g = torch.mm(g, w)
        return loss
