"""Whether a run has come apart: a loss that stays far above what it was, told once.

    bad:  v > 10 best  and  v > v_0,    or v is no finite number
best is the smallest value so far, v_0 the first one. For a classification v_0 is ln c, the loss of one who gives every
class the same odds: below it nothing has come apart, and an evaluation is measured against it from the first round on.
Bad three times in a row, or at the last evaluation, is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import inf, isfinite, isnan, log
from typing import Any

TIMES, IN_A_ROW = 10.0, 3


class Loss:
    """One loss over the rounds. chance: ln c, or None where there is no such thing."""

    def __init__(self, name: str, chance: float | None, from_chance: bool = False) -> None:
        self.name, self.floor = name, chance
        self.best, self.best_round = inf if chance is None or not from_chance else chance, -1
        self.bad: list[int] = []  # rounds in a row, up to now
        self.value = inf

    def see(self, t: int, value: float) -> None:
        self.value, self.floor = value, value if self.floor is None else self.floor
        above = 0 < self.best < inf and value > max(TIMES * self.best, self.floor)
        self.bad = [*self.bad, t] if above or not isfinite(value) else []
        if value < self.best:
            self.best, self.best_round = value, t


class Watch:
    """The losses of one run at rank 0.

    classes: of a classification, else None; evaluation: the name of the loss to look at, None: of none.
    """

    def __init__(self, classes: int | None, evaluation: str | None) -> None:
        chance = log(classes) if classes else None
        self.losses = [Loss("train_loss", chance)]
        self.losses += [Loss(evaluation, chance, from_chance=True)] if evaluation else []
        self.told = False

    def memory(self) -> dict[str, Any]:
        """What earlier rounds have left, for `recall` when a run goes on."""
        return {"told": self.told, "losses": [dict(vars(loss)) for loss in self.losses]}

    def recall(self, memory: dict[str, Any]) -> None:
        self.told = memory["told"]
        for loss, before in zip(self.losses, memory["losses"], strict=True):
            vars(loss).update(before)

    def see(self, row: Mapping[str, Any], last: bool) -> int | None:
        """A round's line of metrics. The round since which a loss is bad, when that is told; else None."""
        if self.told or len(row["refused"]) == len(row["cohort"]):  # nobody's loss counted
            return None
        for loss in self.losses:
            value = row.get(loss.name)
            if value is not None:
                loss.see(row["round"], value)
        for loss in self.losses[::-1]:
            if len(loss.bad) >= IN_A_ROW or (last and loss.bad):
                self.told = True
                warnings.warn(_told(loss), stacklevel=2)
                return loss.bad[0]
        return None


def _told(loss: Loss) -> str:
    since = f"since round {loss.bad[0]}" if len(loss.bad) > 1 else f"in round {loss.bad[0]}"
    now = "no number" if isnan(loss.value) else f"{loss.value:.4g}"
    best = f"{loss.best:.3g}" + (f" in round {loss.best_round}" if loss.best_round >= 0 else " of a mere guess")
    against = f", against {best}" if loss.best < inf else ""
    return (
        f"training has come apart {since}: {loss.name} is {now}{against}; "
        "lower train.lr (or server.lr, the weights of the method's own terms), or let it fall with train.schedule"
    )
