"""Fully connected networks on the flattened sample; without a hidden layer, softmax regression."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn


class MLP(nn.Module):
    """flatten; (linear, ReLU) for each width in `hidden`; linear `classes`."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head: nn.Module = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # (B, hidden[-1]), or the flat sample without a hidden layer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    hidden: Annotated[Sequence[Annotated[int, Field(gt=0)]], Field(min_length=1)] = (200, 200),
) -> MLP:
    """Multilayer perceptron with ReLU; the default widths are the 2NN of the FedAvg paper (McMahan 2017).

    hidden: width of each hidden layer, units, at least one layer. 1 x 28 x 28 images of 10 classes: 199,210 parameters.
    """
    return MLP(math.prod(input_shape), hidden, classes)
