"""Whether a run has come apart: a loss that stays far above what it was, told once.

    bad:  v > 10 best  and  v > v_0,    or v is no finite number
best is the smallest value so far, v_0 the first one. For a classification v_0 is ln c, the loss of one who gives every
class the same odds: below it nothing has come apart, and an evaluation is measured against it from the first round on.
Bad three times in a row, or at the last evaluation, is told; with faults.on_divergence: stop it ends the run after the
round that is under way, whose model, complete and not evaluated, is the run's.
So is a model that gives all test samples one class in three evaluations in a row; that ends nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, log
from typing import Any

TIMES, IN_A_ROW = 10.0, 3
REMEDY = "lower train.lr (or server.lr, the weights of the method's own terms), or let it fall with train.schedule"


@dataclass
class LossTracker:
    """One loss over the rounds."""

    name: str
    floor: float | None  # v_0; None: not known yet
    best: float = inf
    best_round: int = -1
    bad: list[int] = field(default_factory=list)  # rounds in a row, up to now
    value: float = inf

    def see(self, t: int, value: float) -> None:
        self.value, self.floor = value, value if self.floor is None else self.floor
        above = 0 < self.best < inf and value > max(TIMES * self.best, self.floor)
        self.bad = [*self.bad, t] if above or not isfinite(value) else []
        if value < self.best:
            self.best, self.best_round = value, t


class DivergenceMonitor:
    """The losses of one run at rank 0.

    classes: of a classification, else None; evaluation: the name of the loss to look at, None: of none. stop: a run
    that has come apart is to end. said: what was told; ends: the run is to end.
    """

    def __init__(self, classes: int | None, evaluation: str | None, stop: bool = False) -> None:
        self.stop, self.said, self.ends = stop, "", False
        self.only: list[int] = []  # the one class of the last evaluations, once for each
        chance = log(classes) if classes else None
        self.losses = [LossTracker("train_loss", chance)]
        self.losses += [LossTracker(evaluation, chance, best=inf if chance is None else chance)] if evaluation else []
        self.told = False

    def memory(self) -> dict[str, Any]:
        """What earlier rounds have left, for `recall` when a run goes on."""
        return {"told": self.told, "only": self.only, "losses": [dict(vars(loss)) for loss in self.losses]}

    def recall(self, memory: dict[str, Any]) -> None:
        self.told, self.only = memory["told"], memory.get("only", [])
        known = {before["name"]: before for before in memory["losses"]}  # evaluate.protocol may have changed since
        for loss in self.losses:
            vars(loss).update(known.get(loss.name, {}))
            if self.stop and self.told:  # somebody goes on all the same: it is looked at anew
                loss.bad = []
        self.told = self.told and not self.stop

    def see(self, row: Mapping[str, Any], last: bool, only: int | None = None) -> int | None:
        """A round's line of metrics. The round since which a loss is bad, when that is told; else None.

        only: the class that an evaluation found the model to give all test samples, if it did.
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
        if self.told or len(row["refused"]) == len(row["cohort"]):  # nobody's loss counted
            return None
        for loss in self.losses:
            value = row.get(loss.name)
            if value is not None:
                loss.see(row["round"], value)
        for loss in self.losses[::-1]:
            if len(loss.bad) >= IN_A_ROW or (last and loss.bad):
                self.told, self.ends, self.said = True, self.stop, _told(loss)
                warnings.warn(f"{self.said}; {REMEDY}", stacklevel=2)
                return loss.bad[0]
        return None


def _told(loss: LossTracker) -> str:
    since = f"since round {loss.bad[0]}" if len(loss.bad) > 1 else f"in round {loss.bad[0]}"
    now = "no number" if isnan(loss.value) else f"{loss.value:.4g}"
    best = f"{loss.best:.3g}" + (f" in round {loss.best_round}" if loss.best_round >= 0 else " of a mere guess")
    against = f", against {best}" if loss.best < inf else ""
    return f"training has come apart {since}: {loss.name} is {now}{against}"
