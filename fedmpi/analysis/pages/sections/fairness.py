"""How fair figures are over clients, in the numbers of the papers on fairness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HEAD = ("mean", "std", "worst 10 %", "best 10 %", "Jain's index")
ABOUT = (
    "Over clients: population standard deviation, means of the worst and the best tenth, at least one client (q-FFL), "
    "and Jain's index, (sum x)² / (N sum x²): 1 where all clients have the same, 1/N where one has everything."
)


def jain(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (N sum x^2) of figures that are nowhere below 0; None of others, and where all are 0.

    >>> jain([2.0, 2.0, 2.0]), jain([1.0, 0.0, 0.0, 0.0]), jain([1.0, -1.0])
    (1.0, 0.25, None)
    """
    x = np.asarray(values, dtype=np.float64)
    if not len(x) or x.min() < 0 or not x.max():
        return None
    x = x / x.max()  # squares of large losses stay numbers
    return float(x.sum() ** 2 / (len(x) * (x**2).sum()))


def over_clients(values: Sequence[float], falling: bool) -> list[float | None]:
    """The numbers of HEAD; falling: less is better.

    >>> over_clients([90.0, 70.0, 80.0], falling=False)[:4]
    [80.0, 8.16496580927726, 70.0, 90.0]
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    tenth = max(len(x) // 10, 1)
    low, high = float(x[:tenth].mean()), float(x[-tenth:].mean())
    ends = (high, low) if falling else (low, high)
    return [float(x.mean()), float(x.std()), *ends, jain(values)]
