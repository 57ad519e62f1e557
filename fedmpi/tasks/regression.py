"""The task `regression`: one or more real-valued targets per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.tasks import metrics
from fedmpi.tasks.base import (
    IgnoredTarget,
    Task,
    describe_targets,
    is_counted,
    mean_of_counted,
    name_output_columns,
    select_metrics,
)

METRICS = ("mse", "rmse", "mae", "r2")


class Regression(Task):
    """Regression with mean squared error; reports mse and r2.

    Targets are (n,) or (n, ...) float32, and r2 = 1 - sum (y - f)^2 / sum (y - mean y)^2.

    metrics: metrics that replace the default ones: mse, rmse and mae (mean absolute error) over all targets, and r2,
    averaged over the components of a target.
    ignore: a target value that is left out of loss and metrics: nan, or a number such as -999.
    """

    lower_is_better = ("mse", "rmse", "mae")

    def __init__(
        self, classes: int, metrics: tuple[str, ...] | None = None, ignore: IgnoredTarget | None = None
    ) -> None:
        super().__init__(classes)
        self.ignore = None if ignore is None else float(ignore)
        self.names = select_metrics("regression", METRICS, metrics, ("mse", "r2"))

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x).view_as(y)  # (B, 1) becomes (B,), because the difference would otherwise be (B, B)
        if self.ignore is None:
            return functional.mse_loss(f, y)
        counted = is_counted(y, self.ignore)
        return mean_of_counted((f - y.masked_fill(~counted, 0)).square(), counted)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        counted = is_counted(y, self.ignore)
        n = counted.sum()
        y = y.double().masked_fill(~counted, 0)
        residual = (outputs.double().view_as(y) - y).masked_fill(~counted, 0)
        squares = residual.square()
        mse = (squares.sum() / n).item()
        values = {"mse": mse, "rmse": mse**0.5, "mae": (residual.abs().sum() / n).item()}
        if "r2" in self.names:
            mean = y.mean(0) if self.ignore is None else y.sum(0) / counted.sum(0)
            total = (y - mean).masked_fill(~counted, 0).square().sum(0)
            # r2 is undefined for a constant target
            r2 = torch.where(total > 0, 1 - squares.sum(0) / total, torch.nan)
            values["r2"] = metrics.nan_mean(r2)
        return {name: values[name] for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if not y.is_floating_point():
            return (
                f"the targets are {describe_targets(y)}, but must be real numbers (float32); if the data are a table, "
                "set data.target: number; if the targets are classes, set task.name: classification"
            )
        if y[:1].numel() != torch.Size(outputs).numel():
            return (
                f"the targets are {describe_targets(y)}, but the model returns outputs {outputs} per sample; both must "
                "have "
                "the same number of components"
            )
        return ""

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `prediction`, or one column `prediction_NAME` per component of the target."""
        columns = name_output_columns(outputs, names)
        return {name.replace("output", "prediction", 1): values for name, values in columns.items()}


class StandardisedRegression(Regression):
    """Regression on standardised targets, with metrics in the original unit of the targets (data.standardise_target).

    Targets y (n, 3, ...) contain the target, its mean and its standard deviation, which may differ between sites (see
    common/target_scale.py). The model predicts the standardised target.
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
