"""When something happens, where some samples are seen for a while only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmpi.tasks import measures
from fedmpi.tasks.base import Task, look


class Survival(Task):
    """Cox's partial likelihood; the C-index, 0 to 1. Targets (n, 2): event (1: seen, 0: censored), time; one output.

    A batch's loss is  - 1/B sum_{i: event} [ f_i - log sum_{j: t_j >= t_i} exp f_j ]   (Breslow where times are equal);
    that of a split takes all of it as one batch. f is the log of the hazard: who has more of it is expected earlier.
    """

    names = ("c_index",)
    capturable = False  # how many times differ within a batch decides what is computed

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        return negative_log_likelihood(f.view(len(y)), y).to(f.dtype)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        return {"c_index": measures.concordance(outputs.view(len(y)), y[:, 0], y[:, 1])}

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`risk`, the log of the hazard: of whom it is higher, the event is expected earlier."""
        return {"risk": outputs.flatten()}

    def whole_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return negative_log_likelihood(outputs.view(len(y)), y)

    def split_weight(self, y: Tensor) -> int | Tensor:
        """Without an event 0: a loss of 0 there does not say that the model is right."""
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
    """The loss of f (B,) log hazards and y (B, 2) -> (), float64; without an event 0.

    In float64: a patient whom nobody outlives has a gradient of 0, and what rounding leaves of it in float32, 1e-6, is
    a step like any other to Adam.
    """
    f = f.double()
    time, order = y[:, 1].sort(descending=True, stable=True)
    at_risk = f[order].logcumsumexp(0)
    _, times = time.unique_consecutive(return_counts=True)
    last = times.cumsum(0).repeat_interleave(times) - 1  # of those with the same time
    return (y[order, 0] * (at_risk[last] - f[order])).sum() / len(y)
