"""The task `regression`: one or more real-valued targets per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.tasks import metrics
from fedmpi.tasks.base import Ignored, Task, choose, is_counted, look, mean_counted, plain_predictions

KNOWN = ("mse", "rmse", "mae", "r2")


class Regression(Task):
    """Regression with mean squared error; reports mse and r2.

    Targets are (n,) or (n, ...) float32, and r2 = 1 - sum (y - f)^2 / sum (y - mean y)^2.

    metrics: metrics that replace the default ones: mse, rmse and mae (mean absolute error) over all targets, and r2,
    the mean over the targets of a sample.
    ignore: a target that is left out of loss and metrics: nan, or a number such as -999.
    """

    lower_is_better = ("mse", "rmse", "mae")

    def __init__(self, classes: int, metrics: tuple[str, ...] | None = None, ignore: Ignored | None = None) -> None:
        super().__init__(classes)
        self.ignore = None if ignore is None else float(ignore)
        self.names = choose("regression", KNOWN, metrics, ("mse", "r2"))

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x).view_as(y)  # (B, 1) becomes (B,), since the difference would otherwise be (B, B)
        if self.ignore is None:
            return functional.mse_loss(f, y)
        counted = is_counted(y, self.ignore)
        return mean_counted((f - y.masked_fill(~counted, 0)).square(), counted)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        counted = is_counted(y, self.ignore)
        n = counted.sum()
        y = y.double().masked_fill(~counted, 0)
        left = (outputs.double().view_as(y) - y).masked_fill(~counted, 0)
        squares = left.square()
        mse = (squares.sum() / n).item()
        values = {"mse": mse, "rmse": mse**0.5, "mae": (left.abs().sum() / n).item()}
        if "r2" in self.names:
            mean = y.mean(0) if self.ignore is None else y.sum(0) / counted.sum(0)
            total = (y - mean).masked_fill(~counted, 0).square().sum(0)
            # r2 is undefined for a constant target
            r2 = torch.where(total > 0, 1 - squares.sum(0) / total, torch.nan)
            values["r2"] = metrics.mean(r2)
        return {name: values[name] for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if not y.is_floating_point():
            return (
                f"its targets are {look(y)}; it needs a real-valued target (float32; of a table: data.target=number); "
                "choose task.name=classification for class numbers"
            )
        if y[:1].numel() != torch.Size(outputs).numel():
            return f"its targets are {look(y)}, but the model gives {outputs} for a sample; as many numbers are needed"
        return ""

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `prediction`, or `prediction_NAME` for each of several targets."""
        columns = plain_predictions(outputs, names)
        return {name.replace("output", "prediction", 1): values for name, values in columns.items()}


class StandardisedRegression(Regression):
    """Regression on standardised targets, with metrics in the unit of the targets (data.standardise_target).

    Targets y (n, 3, ...) are the target, and the mean and the deviation by which it is standardised
    (`TargetScale.beside`); these may differ between sites. The outputs of the model are standardised targets.
    """

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        target, mean, deviation = y.unbind(1)
        standard = (target - mean) / deviation
        return super().loss(model, x, torch.where(is_counted(target, self.ignore), standard, target))

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        target, mean, deviation = y.double().unbind(1)
        return super().metrics(outputs.double().view_as(target) * deviation + mean, target)

    def batch_weight(self, y: Tensor) -> int | Tensor:
        return super().batch_weight(y[:, 0])

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        return super().check(y[:, 0], outputs)
