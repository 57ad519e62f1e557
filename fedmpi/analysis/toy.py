"""Where FedSOL and FedProx come to rest with two weights.   FedSOL, App. H, Fig. 12

    L_local = (u - u_l)^2 / 2 + delta (v - v_l)^2 / 2,   L_p = mu (u^2 + v^2) / 2
from the global model (0, 0), by gradient descent; as in the paper 4000 steps of 0.01, delta = 0.1, (u_l, v_l) = (1, 1).
The rest is chosen here: mu = 1, rho = 0.5.
    FedProx descends along grad L_local + grad L_p, to (u_l / (1 + mu), delta v_l / (delta + mu)): off the line to the
    local minimum, the farther the less the client's data say of v.
    FedSOL (Lambda = 1) descends along grad L_local at w + rho g_p / |g_p|, to the point of that line that is rho short
    of its end, whatever delta.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedmpi.analysis import figures, report
from fedmpi.common import formatting
from fedmpi.methods._terms import perturbation

DELTA, MU, RHO, LR, STEPS = 0.1, 1.0, 0.5, 0.01, 4000
MINIMUM = torch.tensor([1.0, 1.0], dtype=torch.float64)
CURVED = torch.tensor([1.0, DELTA], dtype=torch.float64)


def analyse(to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse toy`."""
    to = report.folder(to)
    paths = {"FedProx": path(fedprox), "FedSOL": path(fedsol)}
    rests = {"FedProx": MINIMUM * CURVED / (CURVED + MU), "FedSOL": MINIMUM * (1 - RHO / MINIMUM.norm())}
    found = []
    for name, taken in paths.items():
        end, rest = taken[-1], rests[name]
        cosine = torch.cosine_similarity(end, MINIMUM, dim=0).item()
        found.append(
            {"method": name, "end": end, "equilibrium": rest, "cosine": cosine, "local_loss": loss(end).item()}
        )
    head = ("method", "u", "v", "equilibrium u", "v", "cosine to the minimum", "local loss")
    rows = [(f["method"], *f["end"].tolist(), *f["equilibrium"].tolist(), f["cosine"], f["local_loss"]) for f in found]
    for line in formatting.table([head, *rows]):
        say(line)
    facts = {"delta": DELTA, "mu": MU, "rho": RHO, "lr": LR, "steps": STEPS, "minimum": MINIMUM, "methods": found}
    drawn = {name: taken[:: STEPS // 100] for name, taken in paths.items()}
    say(f"written: {report.write(to / 'toy.json', {**facts, 'paths': drawn})}")
    say(f"written: {figures.save(figures.toy(paths, rests, loss, MINIMUM), to / 'toy.png')}")


def loss(w: Tensor) -> Tensor:
    """L_local.   (..., 2) -> (...)"""
    return ((w - MINIMUM).square() * CURVED).sum(-1) / 2


def local(w: Tensor) -> Tensor:
    """grad L_local.   (2,) -> (2,)"""
    return (w - MINIMUM) * CURVED


def fedprox(w: Tensor) -> Tensor:
    return local(w) + MU * w


def fedsol(w: Tensor) -> Tensor:
    return local(w + perturbation(MU * w, RHO))


def path(direction: Callable[[Tensor], Tensor]) -> Tensor:
    """All points from (0, 0) on.   -> (STEPS + 1, 2)"""
    points = [torch.zeros(2, dtype=torch.float64)]
    for _ in range(STEPS):
        points.append(points[-1] - LR * direction(points[-1]))
    return torch.stack(points)
