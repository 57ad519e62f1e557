"""The best model of a run, by a figure on validation rows, and when to stop waiting for a better one.

An evaluation is better than the best so far where its figure is beyond that by more than min_delta. `patience`
evaluations in a row that are not end the run after the round that is under way. All that is known lies in tensors,
which checkpoints hold: the model and what is said of it cannot part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -2.0  # in place of a round; the initial model is that of round -1


@dataclass(frozen=True)
class Choice:
    """What makes one model better than another."""

    figure: str  # validation_accuracy
    lowest: bool
    patience: int | None = None  # evaluations; None: any number
    min_delta: float = 0.0


class Best:
    """Rank 0's. w, b: of the best model; `lasting`: what must be the same again when a run goes on."""

    def __init__(self, choice: Choice, w: Tensor, b: Tensor) -> None:
        self.choice, self.w, self.b, self.why = choice, w.clone(), b.clone(), ""
        self._facts = torch.empty(4, dtype=torch.float64)  # round, value, evaluations since then, the last round seen
        self.forget()

    def forget(self) -> None:
        self._facts.copy_(torch.tensor([NEVER, float("nan"), 0.0, NEVER]))

    @property
    def lasting(self) -> dict[str, Tensor]:
        return {"best_w": self.w, "best_b": self.b, "best": self._facts}

    @property
    def round(self) -> int | None:
        """The round after which it was evaluated; None while there is none."""
        t = int(self._facts[0])
        return None if t == NEVER else t

    @property
    def value(self) -> float:
        return float(self._facts[1])

    def ends(self) -> bool:
        """Whether nobody waits for a better one any more; `why` then says it."""
        if self.choice.patience is None or int(self._facts[2]) < self.choice.patience:
            return False
        self.why = self._said()
        return True

    def see(self, t: int, value: float, w: Tensor, b: Tensor) -> bool:
        """The figure of the model after round t; whether it is the best one now. A nan is no better than anything."""
        if t <= int(self._facts[3]):  # told again, by a run that goes on
            return False
        gain = self.value - value if self.choice.lowest else value - self.value
        better = value == value and (self.round is None or gain > self.choice.min_delta)
        if better:
            self.w.copy_(w)
            self.b.copy_(b)
            self._facts.copy_(torch.tensor([t, value, 0.0, t], dtype=torch.float64))
            self.why += f", and {value:.6g} in round {t}, which was under way" if self.why else ""
        else:
            self._facts[2:].copy_(torch.tensor([self._facts[2] + 1, t]))
        return better

    def _said(self) -> str:
        more = f" by more than {self.choice.min_delta:g}" if self.choice.min_delta else ""
        how = f"has not become {'lower' if self.choice.lowest else 'higher'}{more}"
        best = "never a number" if self.round is None else f"{self.value:.6g} in round {self.round}"
        return f"{self.choice.figure} {how} in {int(self._facts[2])} evaluations; at best {best}"
