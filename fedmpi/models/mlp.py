"""Fully connected networks on the flattened sample, and the forward pass of models that are a chain of layers."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError


class MLP(nn.Module):
    """A multilayer perceptron: flatten; linear and ReLU for each width in `hidden`; a linear layer to the logits."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head: nn.Module = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # (B, hidden[-1]); the flat sample if there is no hidden layer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    hidden: Annotated[Sequence[Annotated[int, Field(gt=0)]], Field(min_length=1)] = (200, 200),
) -> MLP:
    """Multilayer perceptron with ReLU; by default the 2NN of the FedAvg paper (McMahan 2017).

    hidden: units of each hidden layer, at least one layer.

    For 1 x 28 x 28 images of 10 classes it has 199,210 parameters.
    """
    return MLP(math.prod(input_shape), hidden, classes)


class Reference(nn.Module):
    """A linear layer that computes logits of classes 1, 2, ...; the logit of class 0 is always 0."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes - 1)

    def forward(self, z: Tensor) -> Tensor:
        return functional.pad(self.linear(z), (1, 0))  # (B, C)


def logistic(input_shape: tuple[int, ...], classes: int, reference: bool = False) -> MLP:
    """Softmax regression (one linear layer on the flat sample); with the task regression, linear regression.

    reference: class 0 has no weights, and its logit is 0. For two classes this is textbook logistic regression, that is
    Linear(f, 1), sigmoid and binary cross-entropy, whose steps are half as long as with weights for both classes. Its
    features are the flat sample, so that the whole model is its head.

    For 1 x 28 x 28 images of 10 classes it has 7,850 parameters without `reference`.
    """
    inputs = math.prod(input_shape)
    model = MLP(inputs, (), classes)
    if reference:
        if classes < 2:
            raise UserError("model.reference: true needs classes, and the target is a number; leave it out")
        model.head = Reference(inputs, classes)
    return model


POINTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def layers_of(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a chain of known layers in order, or None if the module is not such a chain."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    if type(module) in (MLP, nn.Sequential):  # children() leaves out repetitions of a layer
        found = [layers_of(part) for part in module._modules.values() if part is not None]
        return None if None in found else [layer for each in found if each for layer in each]
    flattens = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return [module] if flattens or type(module) is nn.Linear or type(module) in POINTWISE else None


def straight(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function that equals module(x) but calls no hooks; None if it is not a chain of known layers."""
    layers = layers_of(module)
    if not layers or any(part._compiled_call_impl is not None for part in module.modules()):
        return None
    steps = [layer.forward for layer in layers]

    def forward(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return forward
