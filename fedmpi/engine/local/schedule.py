"""eta_t, the learning rate of round t: constant inside a round.   Papers 001/002 constant, 003 exponential, 004
cosine.
"""

from __future__ import annotations

from math import cos, pi


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
