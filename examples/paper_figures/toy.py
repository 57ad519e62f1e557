"""Where FedSOL and FedProx come to rest with two weights.

Lee, Jeong, Kim, Oh, Yun. FedSOL. CVPR 2024. https://arxiv.org/abs/2308.12532, App. H, Fig. 12

    python examples/paper_figures/toy.py --to figures

    L_local = (u - u_l)^2 / 2 + delta (v - v_l)^2 / 2,   L_p = mu (u^2 + v^2) / 2
from the global model (0, 0), by gradient descent; as in the paper 4000 steps of 0.01, delta = 0.1, (u_l, v_l) = (1, 1).
The rest is chosen here: mu = 1, rho = 0.5.
    FedProx descends along grad L_local + grad L_p, to (u_l / (1 + mu), delta v_l / (delta + mu)): off the line to the
    local minimum, the farther the less the client's data say of v.
    FedSOL (Lambda = 1) descends along grad L_local at w + rho g_p / |g_p|, to the point of that line that is rho short
    of its end, whatever delta.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

DELTA, MU, RHO, LR, STEPS = 0.1, 1.0, 0.5, 0.01, 4000
MINIMUM = torch.tensor([1.0, 1.0], dtype=torch.float64)
CURVED = torch.tensor([1.0, DELTA], dtype=torch.float64)
RESTS = {"FedProx": MINIMUM * CURVED / (CURVED + MU), "FedSOL": MINIMUM * (1 - RHO / MINIMUM.norm())}


def loss(w: Tensor) -> Tensor:
    """L_local.   (..., 2) -> (...)"""
    return ((w - MINIMUM).square() * CURVED).sum(-1) / 2


def local(w: Tensor) -> Tensor:
    """grad L_local.   (2,) -> (2,)"""
    return (w - MINIMUM) * CURVED


def fedprox(w: Tensor) -> Tensor:
    return local(w) + MU * w


def fedsol(w: Tensor) -> Tensor:
    g = MU * w  # of L_p; at the global model it is 0, and nothing is perturbed
    return local(w + RHO * g / g.norm() if g.norm() > 1e-10 else w)


def path(direction: Callable[[Tensor], Tensor]) -> Tensor:
    """All points from (0, 0) on.   -> (STEPS + 1, 2)"""
    points = [torch.zeros(2, dtype=torch.float64)]
    for _ in range(STEPS):
        points.append(points[-1] - LR * direction(points[-1]))
    return torch.stack(points)


def draw(paths: dict[str, Tensor], to: Path) -> None:
    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    axes = figure.subplots()
    axis = torch.linspace(-0.1, 1.2, 131, dtype=torch.float64)
    height = loss(torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1))
    axes.contour(axis, axis, height, levels=12, colors="0.8", linewidths=0.8)
    axes.plot(*zip((0, 0), MINIMUM.tolist(), strict=True), ":", color="0.4", label="line to the local minimum")
    for (name, taken), dash in zip(paths.items(), ("-", "--"), strict=True):
        (line,) = axes.plot(*taken.T, dash, label=f"path of {name}")
        axes.plot(*RESTS[name], "o", color=line.get_color(), markersize=8, label=f"equilibrium of {name}")
    axes.plot(0, 0, "s", label="global model, the start")
    axes.plot(*MINIMUM, "*", markersize=13, label="local minimum")
    axes.set(xlabel="weight $u$", ylabel="weight $v$", aspect="equal")
    axes.legend(loc="upper left", fontsize="small", framealpha=1)
    figure.savefig(to, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("figures"))
    to = parser.parse_args().to
    to.mkdir(parents=True, exist_ok=True)
    paths = {"FedProx": path(fedprox), "FedSOL": path(fedsol)}
    for name, taken in paths.items():
        end, cosine = taken[-1], torch.cosine_similarity(taken[-1], MINIMUM, dim=0)
        rest = ", ".join(f"{x:.4f}" for x in RESTS[name].tolist())
        print(f"{name} ends at {end[0]:.4f}, {end[1]:.4f} (equilibrium {rest}), cosine to the minimum {cosine:.4f}")
    draw(paths, to / "toy.png")


if __name__ == "__main__":
    main()
