"""Selection of the best model of a run by a metric on validation samples, and early stopping.

A model becomes the best one if its metric is better than the best metric so far by more than min_delta. After
`patience` consecutive evaluations without a better model, the run ends with the current round. All state is in tensors,
which are stored in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -2.0  # in place of a round number: no model has been evaluated (the initial model has round -1)


@dataclass(frozen=True)
class SelectionCriterion:
    """The metric by which models are compared, and the rule for early stopping."""

    metric: str  # the name of the metric, for example validation_accuracy
    lower_is_better: bool  # whether a lower value is better
    patience: int | None = None  # number of evaluations without a better model after which the run stops; None: never
    min_delta: float = 0.0


class BestModel:
    """The best model so far (on rank 0): its weights w (d,) and buffers b, its round and its metric."""

    def __init__(self, criterion: SelectionCriterion, w: Tensor, b: Tensor) -> None:
        """Create the object without a best model; `w` and `b` only give the shapes of its weights and buffers."""
        self.criterion, self.w, self.b, self.stop_reason = criterion, w.clone(), b.clone(), ""
        # round and metric of the best model, number of evaluations since then, last evaluated round
        self._progress = torch.empty(4, dtype=torch.float64)
        self.reset()

    def reset(self) -> None:
        """Forget the best model."""
        self._progress.copy_(torch.tensor([NEVER, float("nan"), 0.0, NEVER]))

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """The tensors of this object that are stored in checkpoints, by name."""
        return {"best_w": self.w, "best_b": self.b, "best": self._progress}

    @property
    def round(self) -> int | None:
        """The round that produced the best model; None if there is no best model yet."""
        t = int(self._progress[0])
        return None if t == NEVER else t

    @property
    def value(self) -> float:
        """The metric of the best model."""
        return float(self._progress[1])

    def should_stop(self) -> bool:
        """Return whether the run should stop early; if so, set `stop_reason`."""
        if self.criterion.patience is None or int(self._progress[2]) < self.criterion.patience:
            return False
        more = f" by more than {self.criterion.min_delta:g}" if self.criterion.min_delta else ""
        how = f"has not become {'lower' if self.criterion.lower_is_better else 'higher'}{more}"
        best = "it was always nan" if self.round is None else f"best: {self.value:.6g} in round {self.round}"
        self.stop_reason = f"{self.criterion.metric} {how} in {int(self._progress[2])} evaluations; {best}"
        return True

    def update(self, t: int, value: float, w: Tensor, b: Tensor) -> bool:
        """Compare the model after round t with the best one; return whether it is the new best model.

        Args:
            value: the metric of the model; a model whose metric is nan never becomes the best one.
            w, b: the weights and buffers of the model.
        """
        if t <= int(self._progress[3]):  # a resumed run evaluates its first round again
            return False
        gain = self.value - value if self.criterion.lower_is_better else value - self.value
        better = value == value and (self.round is None or gain > self.criterion.min_delta)
        if better:
            self.w.copy_(w)
            self.b.copy_(b)
            self._progress.copy_(torch.tensor([t, value, 0.0, t], dtype=torch.float64))
        else:
            self._progress[2:].copy_(torch.tensor([self._progress[2] + 1, t]))
        return better
