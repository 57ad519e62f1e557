"""Fully connected networks on the flattened sample, and a fast forward pass for models that are a chain of layers."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError


class MLP(nn.Module):
    """Multilayer perceptron on flattened samples: linear layers of the widths `hidden`, each with ReLU, then a head."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head: nn.Module = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # (B, hidden[-1]), or the flattened samples without hidden layers

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    hidden: Annotated[Sequence[Annotated[int, Field(gt=0)]], Field(min_length=1)] = (200, 200),
) -> MLP:
    """Multilayer perceptron with ReLU; by default the 2NN of the FedAvg paper (McMahan 2017).

    hidden: number of units in each hidden layer; at least one layer is needed.

    For 1 x 28 x 28 images of 10 classes the default model has 199,210 parameters.
    """
    return MLP(math.prod(input_shape), hidden, classes)


class ReferenceClassHead(nn.Module):
    """A linear layer for the logits of classes 1, 2, ...; the logit of class 0, the reference class, is always 0."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes - 1)

    def forward(self, z: Tensor) -> Tensor:
        return functional.pad(self.linear(z), (1, 0))  # (B, C)


def logistic(input_shape: tuple[int, ...], classes: int, reference: bool = False) -> MLP:
    """Softmax regression (for the task `regression`, linear regression): one linear layer on the flattened sample.

    The features are the flattened sample, so that the whole model is its head.

    reference: true fixes the logit of class 0 at 0, without weights. For two classes this is textbook logistic
    regression: one linear output, sigmoid and binary cross-entropy. Its gradient steps are half as large as those of
    the model with weights for both classes.

    For 1 x 28 x 28 images of 10 classes it has 7,850 parameters without `reference`.
    """
    inputs = math.prod(input_shape)
    model = MLP(inputs, (), classes)
    if reference:
        if classes < 2:
            raise UserError(
                "model.reference: true needs a task with classes, but the target is a number; remove model.reference"
            )
        model.head = ReferenceClassHead(inputs, classes)
    return model


POINTWISE_LAYERS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def list_chain_layers(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a module in order if it is a chain of linear and pointwise layers, otherwise None."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    if type(module) in (MLP, nn.Sequential):  # children() leaves out repetitions of a layer
        parts = [list_chain_layers(part) for part in module._modules.values() if part is not None]
        return None if None in parts else [layer for each in parts if each for layer in each]
    flattens = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return [module] if flattens or type(module) is nn.Linear or type(module) in POINTWISE_LAYERS else None


def make_forward_without_hooks(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes module(x) without the overhead of torch's hooks, or None.

    The result is None unless the module is a chain of linear and pointwise layers, has no hooks and is not compiled.
    """
    layers = list_chain_layers(module)
    if not layers or any(part._compiled_call_impl is not None for part in module.modules()):
        return None
    steps = [layer.forward for layer in layers]

    def forward(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return forward
