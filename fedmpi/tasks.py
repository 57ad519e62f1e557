"""What is learned: the loss that clients descend and the figures by which a model is judged.

A user's task derives from `Task`, or has a `loss` and `metrics` like it; `names` may be left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import Kind

registry: dict[str, str] = {
    "classification": "fedmpi.tasks:Classification",
    "regression": "fedmpi.tasks:Regression",
}
KIND = Kind("task", registry, "task", ("classes",))


class Task(ABC):
    """A loss and its metrics, for a data set of `classes` classes (1 for a real-valued target).

    `names`: keys of `metrics`, the headline first.
    """

    names: tuple[str, ...]
    classification = False  # whether outputs are logits over classes, and targets class numbers: what some methods need

    def __init__(self, classes: int) -> None:
        self.classes = classes

    @abstractmethod
    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch, (). Calls `model(x)` exactly once: evaluation passes outputs made before as `model`."""

    @abstractmethod
    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """The figures in `names` for a split's outputs, (n, outputs), and targets, (n,); nan where undefined."""


class Classification(Task):
    """Cross-entropy; accuracy in percent, and for two classes the area under the ROC curve, 0 to 1."""

    classification = True

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        if classes < 2:
            raise UserError(
                f"task classification: the data set has {classes} class, but it needs 2 or more; "
                "store class numbers as whole numbers, or choose task.name=regression for a real-valued target"
            )
        self.names = ("accuracy", "auroc") if classes == 2 else ("accuracy",)

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        correct = (outputs.argmax(1) == y).sum(dtype=torch.float64)  # argmax: of equal logits the lowest class
        figures = {"accuracy": (100 * correct / len(y)).item()}  # no rows: 0 / 0 = nan
        if "auroc" in self.names:
            figures["auroc"] = _auroc(outputs, y)
        return figures


class Regression(Task):
    """Mean squared error of one real target; mse, and r2 = 1 - sum (y - f)^2 / sum (y - mean y)^2."""

    names = ("mse", "r2")

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        if classes != 1:
            raise UserError(
                f"task regression: the data set has {classes} classes, but it needs a real-valued target (classes=1); "
                "choose task.name=classification"
            )

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x).view_as(y), y)  # (B, 1) as (B,): else the difference would be (B, B)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        y = y.double()
        left = (outputs.double().view_as(y) - y).square().sum()
        total = (y - y.mean()).square().sum()
        r2 = 1 - left / total if total > 0 else torch.tensor(torch.nan)  # a constant target has nothing to explain
        return {"mse": (left / len(y)).item(), "r2": r2.item()}


def metric_names(task: Any, outputs: int, classes: int) -> tuple[str, ...]:
    """`task.names`; if a user's task has none, the keys of its metrics for two samples with zero outputs."""
    if not getattr(task, "names", ()):
        y = torch.arange(2.0) if classes == 1 else torch.arange(2)
        try:
            task.names = tuple(task.metrics(torch.zeros(2, outputs), y))
        except Exception as error:
            raise UserError(
                f"task {type(task).__name__}: its metrics fail on two samples with zero outputs: {error}; mend them, "
                "or say what they are called: names = ('accuracy',)"
            ) from error
        if not task.names:
            raise UserError(f"task {type(task).__name__}: metrics gives no figure; at least one is needed")
    return tuple(task.names)


def _auroc(outputs: Tensor, y: Tensor) -> float:
    """P(score of a positive > that of a negative) + P(equal)/2, score = logit 1 - logit 0; nan without both classes."""
    from sklearn.metrics import roc_auc_score  # takes a second to import; only two-class tasks need it

    score = (outputs[:, 1].double() - outputs[:, 0].double()).cpu().numpy()  # (n,)
    truth = y.cpu().numpy()
    if len(np.unique(truth)) < 2 or not np.isfinite(score).all():
        return float("nan")
    return float(roc_auc_score(truth, score))
