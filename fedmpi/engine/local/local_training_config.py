"""Settings of local training: its length, its optimiser, and learning rate schedules."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, pi


@dataclass(frozen=True)
class LocalTrainingConfig:
    """The section `train` of a config, without the learning rate, which depends on the round."""

    epochs: int | None = 1  # None: `steps` is used
    steps: int | None = None
    batch_size: int | None = None  # None: full batch
    accumulate: int = 1  # number of parts of a batch whose gradients are computed one after another
    drop_last: bool = False
    optim: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    persist_optimizer: bool = False  # whether clients keep the optimiser's state between rounds

    def with_plain_sgd(self) -> LocalTrainingConfig:
        """Return settings with the same epochs and batches, but with plain SGD steps w <- w - lr g."""
        return LocalTrainingConfig(self.epochs, self.steps, self.batch_size, self.accumulate, self.drop_last)

    def not_plain_sgd_reason(self) -> str:
        """Return which setting prevents w - w0 from being a weighted sum of gradients; "" if none does."""
        reasons = {
            f"train.optim is {self.optim}": self.optim != "sgd",
            f"train.clip_norm is {self.clip_norm}": self.clip_norm is not None,
            "train.persist_optimizer is true": self.persist_optimizer,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def passes_and_steps(self, n: int, batches_per_step: int = 1, epochs: int | None = None) -> tuple[int, int]:
        """Return how many passes over its samples a client starts, and how many steps it takes in total.

        If train.steps is set, the last pass may be incomplete.

        Args:
            n: number of samples of the client.
            batches_per_step: number of batches per step.
            epochs: number of epochs that replaces the configured epochs or steps; None: as configured.
        """
        size = self.batch_size or max(n, 1)
        batches = n // size if self.drop_last else ceil(n / size)
        # An incomplete group of batches gives a step only if it is the only one.
        steps_per_pass = batches // batches_per_step or min(batches, 1)
        if not steps_per_pass:
            return 0, 0
        if epochs is None and self.steps is not None:
            return ceil(self.steps / steps_per_pass), self.steps
        passes = (self.epochs or 0) if epochs is None else epochs
        return passes, passes * steps_per_pass


def learning_rate(
    lr: float, schedule: str, round_: int, rounds: int, decay: float | None = None, warmup_rounds: int = 0
) -> float:
    """Return the learning rate eta_t of a round.

    With eta_0 = lr, t = round_ and T = rounds, the schedules are
        constant      eta_0
        exponential   eta_0 decay^t (default decay 0.99)
        cosine        eta_0 / 2 (1 + cos(pi t / T))
        step          eta_0, multiplied by decay (default 0.1) from T/2 on, and again from 3T/4 on
    If R = warmup_rounds > 0, the result is multiplied by min(1, t / R), so that round 0 has learning rate 0, as in the
    published runs of FedLD.

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
