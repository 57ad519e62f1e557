"""How much clients train, and by which optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, pi


@dataclass(frozen=True)
class LocalTrainingConfig:
    """The section `train` of a config (config/sections.py), without the learning rate, which depends on the round."""

    epochs: int | None = 1  # None: steps counts
    steps: int | None = None
    batch_size: int | None = None  # None: full batch
    drop_last: bool = False
    optim: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    keep: bool = False  # the optimiser's state, from round to round

    def plain_sgd(self) -> LocalTrainingConfig:
        """Return the same batches with steps w <- w - lr g."""
        return LocalTrainingConfig(self.epochs, self.steps, self.batch_size, self.drop_last)

    def not_plain_sgd_reason(self) -> str:
        """Return the setting that makes w - w0 other than lr times a weighted sum of gradients; "" if none does."""
        reasons = {
            f"train.optim is {self.optim}": self.optim != "sgd",
            f"train.clip_norm is {self.clip_norm}": self.clip_norm is not None,
            "train.keep_optim is true": self.keep,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def passes_and_steps(self, n: int, many: int = 1, epochs: int | None = None) -> tuple[int, int]:
        """Passes that a client with n samples begins, and its steps in all of them; train.steps may cut the last short.

        many: batches that a step takes; epochs: in place of its own epochs or steps.
        """
        size = self.batch_size or max(n, 1)
        batches = n // size if self.drop_last else ceil(n / size)
        a_pass = batches // many or min(batches, 1)  # an incomplete group counts where it is the only one
        if not a_pass:
            return 0, 0
        if epochs is None and self.steps is not None:
            return ceil(self.steps / a_pass), self.steps
        passes = (self.epochs or 0) if epochs is None else epochs
        return passes, passes * a_pass


def learning_rate(
    lr: float, schedule: str, round_: int, rounds: int, decay: float | None = None, warmup_rounds: int = 0
) -> float:
    """eta_t for t = round_ of T = rounds:

        constant eta_0;   exponential eta_0 decay^t (0.99);   cosine eta_0/2 (1 + cos(pi t/T));
        step eta_0, times decay (0.1) from T/2 and again from 3T/4.
    warmup_rounds R > 0 multiplies by min(1, t/R): round 0 has rate 0, as in FedLD's published runs.

    >>> learning_rate(0.1, "cosine", 5, 10)
    0.05
    """
    if schedule == "exponential":
        lr *= (0.99 if decay is None else decay) ** round_
    elif schedule == "cosine":
        lr *= (1 + cos(pi * round_ / rounds)) / 2
    elif schedule == "step":
        lr *= (0.1 if decay is None else decay) ** ((2 * round_ >= rounds) + (4 * round_ >= 3 * rounds))
    return lr * min(1.0, round_ / warmup_rounds) if warmup_rounds else lr
