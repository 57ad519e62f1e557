"""The task `survival`: times until an event, some of them censored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmpi.tasks import metrics
from fedmpi.tasks.base import Task, look


class Survival(Task):
    """Survival analysis with Cox's partial likelihood; reports the C-index (0 to 1).

    Targets are (n, 2): the event (1: seen, 0: censored) and the time. The model has one output f, the log hazard: a
    sample with a higher f is expected to have its event earlier. The loss of a batch is
        - 1/B sum_{i: event} [ f_i - log sum_{j: t_j >= t_i} exp f_j ]        (Breslow's method for equal times)
    and the loss of a split is computed as if the split were one batch.
    """

    names = ("c_index",)
    capturable = False  # the operations depend on the number of distinct times in a batch

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        return negative_log_likelihood(f.view(len(y)), y).to(f.dtype)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return {"c_index": metrics.concordance(outputs.view(len(y)), y[:, 0], y[:, 1])}

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `risk`, the log hazard of each sample: the event is expected earlier if it is higher."""
        return {"risk": outputs.flatten()}

    def whole_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return negative_log_likelihood(outputs.view(len(y)), y)

    def split_weight(self, y: Tensor) -> int | Tensor:
        """Return the number of samples, or 0 if none has an event, since such a split has no meaningful loss."""
        return len(y) if bool((y[:, 0] == 1).any()) else 0

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if tuple(y.shape[1:]) != (2,) or not y.is_floating_point():
            needed = "float32 (n, 2) is needed: event (1: seen, 0: censored), time"
            return f"its targets are {look(y)}; {needed}; of a table data.label_column: [EVENT, TIME]"
        if torch.Size(outputs).numel() != 1:
            return f"the model gives {outputs} for a sample; one number is needed (data with classes=1)"
        odd = ((y[:, 0] != 0) & (y[:, 0] != 1)).nonzero()
        if len(odd):
            row = int(odd[0])
            return (
                f"row {row} has the event {y[row, 0].item():g}; 1 (seen) or 0 (censored), and then the time, is needed"
            )
        early = (~(y[:, 1] >= 0)).nonzero()
        if len(early):
            row = int(early[0])
            return f"row {row} has the time {y[row, 1].item():g}; no time is below 0"
        return ""


def negative_log_likelihood(f: Tensor, y: Tensor) -> Tensor:
    """Return the loss of log hazards f (B,) and targets y (B, 2), () float64; 0 without an event.

    It is computed in float64: a sample that no other sample outlives has a gradient of 0, but in float32 a rounding
    error of 1e-6 remains, which Adam would scale to a full step.
    """
    f = f.double()
    time, order = y[:, 1].sort(descending=True, stable=True)
    at_risk = f[order].logcumsumexp(0)
    _, times = time.unique_consecutive(return_counts=True)
    last = times.cumsum(0).repeat_interleave(times) - 1  # index of the last sample with the same time
    return (y[order, 0] * (at_risk[last] - f[order])).sum() / len(y)
