"""Averages of 5 and of 25 small models on their loss landscape.   Sec. 6.6, Fig. 1(b)

Samples x ~ N(y mu, I), y = +1 or -1 with probability 1/2 each, mu = (2, 2); the model w.x has two weights, and
    L(w) = E (w.x - y)^2 = w'A w - 2 w.mu + 1,   A = I + mu mu',   least at w* = A^-1 mu = mu / 9
The paper gives the means, the loss and the numbers 5 and 25. The rest is chosen here: covariance I, `SAMPLES` per
client, w = `START` for all, `STEPS` of full-batch gradient descent at `LR`.

The clients are independent, so an average of 25 varies a fifth as much as one of 5. The paper argues with 25 = 5^2,
five clients and their 20 virtual ones; those are products of the same factors and not independent. How much of the
factor 5 remains in a real network is what `fedmpi analyse variance` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmpi.analysis import figures, report
from fedmpi.analysis.filter_decomposition.products import replicate_variance
from fedmpi.common import formatting, seeds

MU = torch.tensor([2.0, 2.0], dtype=torch.float64)
A = torch.eye(2, dtype=torch.float64) + torch.outer(MU, MU)
OPTIMUM = torch.linalg.solve(A, MU)
START = torch.tensor([0.3, 0.1], dtype=torch.float64)
SAMPLES, STEPS, LR = 10, 30, 0.05
CLIENTS, REPETITIONS = (5, 25), 4000


def analyse(seed: int, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse gaussians`."""
    to = report.folder(to)
    models = {m: averaged(m, seed) for m in CLIENTS}
    found = [describe(m, w) for m, w in models.items()]
    facts = {"seed": seed, "mean": MU, "covariance": "identity", "start": START, "optimum": OPTIMUM}
    facts |= {"samples": SAMPLES, "steps": STEPS, "lr": LR, "repetitions": REPETITIONS, "averages": found}
    say(f"averages of linear models, {REPETITIONS} repetitions")
    for line in formatting.table([tuple(found[0]), *(tuple(row.values()) for row in found)]):
        say(line)
    say(f"ratio of the variances: {found[0]['variance'] / found[1]['variance']:.3g}")
    say(f"written: {report.write(to / 'gaussians.json', facts)}")
    say(f"written: {figures.save(figures.landscapes(models, loss, START, OPTIMUM), to / 'gaussians.png')}")


def loss(w: Tensor) -> Tensor:
    """L(w).   (..., 2) -> (...)"""
    return ((w @ A) * w).sum(-1) - 2 * w @ MU + 1


def averaged(clients: int, seed: int) -> Tensor:
    """Mean of the trained models of that many clients, for each repetition, (REPETITIONS, 2)."""
    g = seeds.generator(seed, "gaussians", clients)
    y = torch.randint(2, (REPETITIONS, clients, SAMPLES), generator=g).double() * 2 - 1
    x = y[..., None] * MU + torch.randn(*y.shape, 2, generator=g, dtype=torch.float64)
    return trained(x, y).mean(1)


def trained(x: Tensor, y: Tensor) -> Tensor:
    """w after STEPS of  w <- w - LR grad mean (w.x - y)^2.   (..., n, 2), (..., n) -> (..., 2)"""
    square, cross = x.mT @ x / y.shape[-1], (x * y[..., None]).mean(-2)  # (..., 2, 2), (..., 2)
    w = START.expand_as(cross)
    for _ in range(STEPS):
        w = w - 2 * LR * ((square @ w[..., None])[..., 0] - cross)
    return w


def describe(clients: int, w: Tensor) -> dict[str, Any]:
    """Variance of the averaged models w (R, 2) and their mean loss above the least."""
    excess = (loss(w) - loss(OPTIMUM)).mean().item()
    return {"clients": clients, "variance": replicate_variance(w), "loss above the least, mean": excess}
