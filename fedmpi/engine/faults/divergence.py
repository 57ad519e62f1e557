"""Detection of divergence: a loss that stays far above its best value, or is not finite, is reported once.

    A value v of a loss is bad if   v > 10 best  and  v > v_0,   or if it is not finite.

Here `best` is the smallest value so far, and v_0 the first value. For classification, v_0 is ln c, the loss of uniform
predictions for c classes; a smaller loss is never bad, and `best` of the evaluation loss starts at ln c. Divergence is
reported if a loss is bad three times in a row, or at the last evaluation. With faults.on_divergence: stop, the run then
ends with the current round, whose model is complete but not evaluated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, log
from typing import Any

BAD_FACTOR, BAD_IN_A_ROW = 10.0, 3
REMEDY = "lower train.lr (or server.lr, or the weights of the method's own terms), or decay it with train.schedule"


@dataclass
class LossTracker:
    """Tracks one loss over the rounds: its best value, and how long it has been bad without interruption.

    A loss is bad if it is not finite, or larger than both `floor` and `BAD_FACTOR` times its best value so far.
    """

    name: str
    floor: float | None  # v_0; None before the first value
    best: float = inf
    best_round: int = -1
    bad: list[int] = field(default_factory=list)  # rounds of the present uninterrupted sequence in which it was bad
    value: float = inf

    def record(self, t: int, value: float) -> None:
        """Record the loss of round t."""
        self.value, self.floor = value, value if self.floor is None else self.floor
        above = 0 < self.best < inf and value > max(BAD_FACTOR * self.best, self.floor)
        self.bad = [*self.bad, t] if above or not isfinite(value) else []
        if value < self.best:
            self.best, self.best_round = value, t

    def __str__(self) -> str:
        since = f"since round {self.bad[0]}" if len(self.bad) > 1 else f"in round {self.bad[0]}"
        now = "not finite" if not isfinite(self.value) else f"{self.value:.4g}"
        best = f"{self.best:.3g}" + (
            f" in round {self.best_round}" if self.best_round >= 0 else " for uniform guessing"
        )
        best = f"; the best value was {best}" if self.best < inf else ""
        return f"training has diverged {since}: {self.name} is {now}{best}"


class DivergenceMonitor:
    """Monitors the losses of one run, on rank 0.

    Attributes:
        message: the description of the divergence that was reported; "" if none was.
        should_stop: whether the run should end because of divergence.
    """

    def __init__(self, classes: int | None, evaluation: str | None, stop: bool = False) -> None:
        """Monitor the training loss, and an evaluation loss if there is one.

        Args:
            classes: the number of classes of a classification task; None for other tasks.
            evaluation: the name of the evaluation loss; None if there is none.
            stop: whether the run should end if it has diverged (faults.on_divergence: stop).
        """
        self.stops_run, self.message, self.reported, self.should_stop = stop, "", False, False
        chance = log(classes) if classes else None
        self.losses = [LossTracker("train_loss", chance)]
        self.losses += [LossTracker(evaluation, chance, best=inf if chance is None else chance)] if evaluation else []

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, for checkpoints."""
        return {"reported": self.reported, "losses": [asdict(loss) for loss in self.losses]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; if divergence ended that run, monitoring starts anew."""
        before = {loss["name"]: loss for loss in state["losses"]}  # evaluate.protocol may have changed since then
        for loss in self.losses:
            vars(loss).update(before.get(loss.name, {}))
            if self.stops_run and state["reported"]:
                loss.bad = []
        self.reported = state["reported"] and not self.stops_run

    def record(self, row: Mapping[str, Any], last: bool) -> int | None:
        """Record the row of metrics of one round, and warn if training has diverged.

        Args:
            last: whether this is the last evaluation of the run.

        Returns:
            The first round with a bad loss if this call reports divergence, otherwise None.
        """
        if self.reported or ("refused" in row and len(row["refused"]) == len(row["cohort"])):  # no upload counted
            return None
        for loss in self.losses:
            if (value := row.get(loss.name)) is not None:
                loss.record(row["round"], value)
        for loss in self.losses[::-1]:
            if len(loss.bad) >= BAD_IN_A_ROW or (last and loss.bad):
                self.reported, self.message, self.should_stop = True, str(loss), self.stops_run
                warnings.warn(f"{self.message}; {REMEDY}", stacklevel=2)
                return loss.bad[0]
        return None
