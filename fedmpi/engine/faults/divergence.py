"""Detects divergence: a loss that stays far above its best value so far, reported once.

    bad:  v > 10 best  and  v > v_0,    or v is not finite
best is the smallest value so far, v_0 the first one. For a classification v_0 is ln c, the loss of equal odds for all
classes: no smaller loss is bad, and an evaluation is compared with it from the first round on. A loss that is bad three
times in a row, or at the last evaluation, is reported. With faults.on_divergence: stop the run then ends with the round
that is under way, whose model is complete and not evaluated.
A model that gives all test samples one class in three evaluations in a row is reported, too; that ends nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, log
from typing import Any

TIMES, IN_A_ROW = 10.0, 3
REMEDY = "lower train.lr (or server.lr, the weights of the method's own terms), or let it fall with train.schedule"


@dataclass
class LossTracker:
    """One loss over the rounds: its best value, and the rounds in a row in which it was bad."""

    name: str
    floor: float | None  # v_0; None: not known yet
    best: float = inf
    best_round: int = -1
    bad: list[int] = field(default_factory=list)  # rounds in a row, up to now
    value: float = inf

    def record(self, t: int, value: float) -> None:
        self.value, self.floor = value, value if self.floor is None else self.floor
        above = 0 < self.best < inf and value > max(TIMES * self.best, self.floor)
        self.bad = [*self.bad, t] if above or not isfinite(value) else []
        if value < self.best:
            self.best, self.best_round = value, t


class DivergenceMonitor:
    """Watches the losses of one run, at rank 0.

    Attributes:
        message: the divergence that was reported, else "".
        ends: whether the run is to end.
    """

    def __init__(self, classes: int | None, evaluation: str | None, stop: bool = False) -> None:
        """classes: of a classification; evaluation: the evaluation loss to watch, if any; stop: end a diverged run."""
        self.stop, self.message, self.ends = stop, "", False
        self.only: list[int] = []  # the class of each of the last evaluations in which there was one alone
        chance = log(classes) if classes else None
        self.losses = [LossTracker("train_loss", chance)]
        self.losses += [LossTracker(evaluation, chance, best=inf if chance is None else chance)] if evaluation else []
        self.reported = False

    def memory(self) -> dict[str, Any]:
        """Return what `recall` needs when the run is resumed."""
        return {"told": self.reported, "only": self.only, "losses": [dict(vars(loss)) for loss in self.losses]}

    def recall(self, memory: dict[str, Any]) -> None:
        self.reported, self.only = memory["told"], memory.get("only", [])
        known = {before["name"]: before for before in memory["losses"]}  # evaluate.protocol may have changed since
        for loss in self.losses:
            vars(loss).update(known.get(loss.name, {}))
            if self.stop and self.reported:  # resumed after it has ended the run: begin anew
                loss.bad = []
        self.reported = self.reported and not self.stop

    def record(self, row: Mapping[str, Any], last: bool, only: int | None = None) -> int | None:
        """Record a round's row of metrics; return the round since which a loss is bad, if that is reported now.

        only: the class that the model gives all test samples, if there is one.
        """
        if "loss" in row:
            known = len(self.only) >= IN_A_ROW
            self.only = [] if only is None else [*(c for c in self.only if c == only), only][-IN_A_ROW:]
            if len(self.only) == IN_A_ROW and not known:
                warnings.warn(
                    f"in {IN_A_ROW} evaluations in a row, the last after round {row['round']}, the model gives all "
                    f"test samples class {only}: it tells no classes apart. Usual causes are a learning rate that is "
                    "far too high or low, and clients that have one class each",
                    stacklevel=2,
                )
        if self.reported or len(row["refused"]) == len(row["cohort"]):  # no upload counted
            return None
        for loss in self.losses:
            value = row.get(loss.name)
            if value is not None:
                loss.record(row["round"], value)
        for loss in self.losses[::-1]:
            if len(loss.bad) >= IN_A_ROW or (last and loss.bad):
                self.reported, self.ends, self.message = True, self.stop, _describe(loss)
                warnings.warn(f"{self.message}; {REMEDY}", stacklevel=2)
                return loss.bad[0]
        return None


def _describe(loss: LossTracker) -> str:
    since = f"since round {loss.bad[0]}" if len(loss.bad) > 1 else f"in round {loss.bad[0]}"
    now = "not finite" if not isfinite(loss.value) else f"{loss.value:.4g}"
    best = f"{loss.best:.3g}" + (f" in round {loss.best_round}" if loss.best_round >= 0 else " for guessing")
    against = f", against {best}" if loss.best < inf else ""
    return f"training has diverged {since}: {loss.name} is {now}{against}"
