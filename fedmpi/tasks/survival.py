"""The task `survival`: times until an event, some of them censored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmpi.tasks import metrics
from fedmpi.tasks.base import Task, describe_targets


class Survival(Task):
    """Survival analysis with Cox's partial likelihood; reports the C-index (0 to 1).

    Targets are (n, 2): the event (1: observed, 0: censored) and the time t. The model has one output f, the log hazard:
    the higher f is, the earlier the event is expected. The loss of a batch is
        - 1/B sum_{i: event} [ f_i - log sum_{j: t_j >= t_i} exp f_j ]        (Breslow's method for equal times)
    In evaluations the whole data split is one batch.
    """

    names = ("c_index",)
    capturable = False  # the operations depend on the number of distinct times in a batch

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        return cox_loss(f.view(len(y)), y).to(f.dtype)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return {"c_index": metrics.concordance_index(outputs.view(len(y)), y[:, 0], y[:, 1])}

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `risk`, the log hazard of each sample; the higher it is, the earlier the event is expected."""
        return {"risk": outputs.flatten()}

    def split_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return cox_loss(outputs.view(len(y)), y)

    def split_weight(self, y: Tensor) -> int | Tensor:
        """Return the number of samples, or 0 if no sample has an event, because the loss is then undefined."""
        return len(y) if bool((y[:, 0] == 1).any()) else 0

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if tuple(y.shape[1:]) != (2,) or not y.is_floating_point():
            needed = "must be float32 of shape (n, 2) with the columns event (1: observed, 0: censored) and time"
            return f"the targets are {describe_targets(y)}; {needed}; for a table, set data.label_column: [EVENT, TIME]"
        if torch.Size(outputs).numel() != 1:
            return (
                f"the model returns outputs {outputs} per sample, but must return one number; use data with classes=1"
            )
        not_binary = ((y[:, 0] != 0) & (y[:, 0] != 1)).nonzero()
        if len(not_binary):
            row = int(not_binary[0])
            return (
                f"the event in row {row} is {y[row, 0].item():g}; must be 1 (observed) or 0 (censored); correct it, "
                "and "
                "put the event before the time"
            )
        negative = (~(y[:, 1] >= 0)).nonzero()
        if len(negative):
            row = int(negative[0])
            return f"the time in row {row} is {y[row, 1].item():g}; must be at least 0; correct it or drop the row"
        return ""


def cox_loss(f: Tensor, y: Tensor) -> Tensor:
    """Return the negative partial log-likelihood of log hazards f (B,) for targets y (B, 2), divided by B.

    The loss is a float64 scalar, 0 if there is no event. The loss is computed in float64 because a sample that
    outlives all others must have gradient 0; in float32 it could be 1e-6, which Adam would scale to a full step.
    """
    f = f.double()
    time, order = y[:, 1].sort(descending=True, stable=True)
    at_risk = f[order].logcumsumexp(0)
    _, times = time.unique_consecutive(return_counts=True)
    last = times.cumsum(0).repeat_interleave(times) - 1  # index of the last sample with the same time
    return (y[order, 0] * (at_risk[last] - f[order])).sum() / len(y)
