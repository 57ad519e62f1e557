"""The convex case, for which convergence theorems hold."""

import math

from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.models.mlp import MLP


class Reference(nn.Module):
    """Logits of classes - 1 classes from one linear layer; that of class 0 is always 0."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes - 1)

    def forward(self, z: Tensor) -> Tensor:
        return functional.pad(self.linear(z), (1, 0))  # (B, C)


def logistic(input_shape: tuple[int, ...], classes: int, reference: bool = False) -> MLP:
    """Softmax regression (one linear layer on the flat sample); with the regression task, linear regression.

    reference: class 0 has no weights, its logit is 0. For two classes that is logistic regression as textbooks have it,
    Linear(f, 1), sigmoid and binary cross-entropy, whose steps are half as long as those of the form with weights for
    both classes. Its features are the flat sample itself, so the whole model is its head. 1 x 28 x 28 images of 10
    classes: 7,850 parameters.
    """
    inputs = math.prod(input_shape)
    model = MLP(inputs, (), classes)
    if reference:
        if classes < 2:
            raise UserError("model.reference: true needs classes, and the target is a number; leave it out")
        model.head = Reference(inputs, classes)
    return model
