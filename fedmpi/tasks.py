"""What is learned: the loss that clients descend and the figures by which a model is judged.

A user's task derives from `Task`, or has a `loss` and `metrics` like it; `names` may be left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.common.blame import in_user_code, told
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
        """The figures in `names`, and no others, of a split's outputs, (n, outputs), and targets, (n,); nan where
        undefined."""


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
        self.names = ("accuracy",)
        if classes == 2:
            from sklearn.metrics import roc_auc_score  # takes a second to import; only two-class tasks need it

            self.names, self._area = ("accuracy", "auroc"), roc_auc_score

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        correct = (outputs.argmax(1) == y).sum(dtype=torch.float64)  # argmax: of equal logits the lowest class
        figures = {"accuracy": (100 * correct / len(y)).item()}  # no rows: 0 / 0 = nan
        if "auroc" in self.names:
            figures["auroc"] = self._auroc(outputs, y)
        return figures

    def _auroc(self, outputs: Tensor, y: Tensor) -> float:
        """P(score of a positive > that of a negative) + P(equal)/2, score = logit 1 - logit 0; nan without both
        classes."""
        score = (outputs[:, 1].double() - outputs[:, 0].double()).cpu().numpy()  # (n,)
        truth = y.cpu().numpy()
        if len(np.unique(truth)) < 2 or not np.isfinite(score).all():
            return float("nan")
        return float(self._area(truth, score))


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


# What a line of metrics.jsonl or clients.jsonl holds besides the task's figures.
TAKEN = {
    *(
        "round",
        "loss",
        "train_loss",
        "cohort",
        "refused",
        "diverged",
        "sha256",
        "client",
        "site",
        "protocol",
        "samples",
    ),
    *("wall_s", "train_s", "wait_s", "server_s", "evaluate_s"),
    *("sent_bytes", "received_bytes", "up_parameters", "down_parameters"),
}


def check_task(task: Any) -> None:
    """A user's task need not derive from `Task`, but it has what a task has."""
    for needed in ("loss", "metrics"):
        if not callable(getattr(task, needed, None)):
            have = f"task.name stands for {type(task).__name__}, which has no function {needed}"
            raise told(f"{have}; a task has loss and metrics (fedmpi.Task)", task)


def metric_names(task: Any, outputs: int, classes: int) -> tuple[str, ...]:
    """`task.names`; if a user's task has none, the keys of its metrics for two samples with zero outputs."""
    said = f"task {type(task).__name__}"
    names: Any = getattr(task, "names", ())
    if isinstance(names, str):
        raise told(f"{said}: names is the text {names!r}; it must be a tuple of names: ({names!r},)", task)
    if not names:
        y = torch.arange(2.0) if classes == 1 else torch.arange(2)
        try:
            names = figures(task, torch.zeros(2, outputs), y)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            found = f" ({place})" if (place := in_user_code(error)) else ""
            raise UserError(
                f"{said}: its metrics fail on two samples with zero outputs: {type(error).__name__}: {error}; mend "
                f"them, or say what they are called: names = ('accuracy',){found}"
            ) from error
    names = tuple(names)
    if not names:
        raise told(f"{said}: metrics gives no figure; at least one is needed", task)
    spread = {f"{name}{end}" for name in names for end in ("_std", "_worst_decile")}  # made of each by the engine
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise told(f"{said}: a metric is called {name!r}; a name is a text", task)
        if name in TAKEN | spread or name in names[:i]:
            raise told(
                f"{said}: a metric is called {name!r}, which is the name of something else; choose another", task
            )
    return names


def figures(task: Any, outputs: Tensor, y: Tensor) -> dict[str, float]:
    """The task's metrics, checked: numbers under the names that it declares."""
    found = task.metrics(outputs, y)
    said = f"task {type(task).__name__}: metrics"
    if not isinstance(found, Mapping):
        raise told(f"{said} returned {type(found).__name__}; it must return {{name: number}}", task.metrics)
    names = getattr(task, "names", ()) or tuple(found)
    odd = [name for name in found if name not in names] + [name for name in names if name not in found]
    if odd:
        have = f"{said} returned {', '.join(map(repr, found)) or 'nothing'}"
        raise told(f"{have}, but names is {tuple(names)}: they must agree in {odd[0]!r}", task.metrics)
    checked = {}
    for name, value in found.items():
        one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, np.generic)
        plain = value.item() if one else value
        if not isinstance(plain, (int, float)):
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            text = f"{said} returned {type(value).__name__}{shape} for {name!r}; a number is needed"
            raise told(text, task.metrics)
        checked[name] = float(plain)
    return checked
