"""The equilibria of FedSOL and FedProx for a loss with two weights.

Lee, Jeong, Kim, Oh, Yun. FedSOL. CVPR 2024. https://arxiv.org/abs/2308.12532, App. H, Fig. 12

    python examples/paper_figures/toy.py --to figures

    L_local = (u - u_l)^2 / 2 + delta (v - v_l)^2 / 2,   L_p = mu (u^2 + v^2) / 2
Gradient descent starts from the global model (0, 0). As in the paper it makes 4000 steps of 0.01 with delta = 0.1 and
(u_l, v_l) = (1, 1). The other settings are our choice: mu = 1, rho = 0.5.
    FedProx descends along grad L_local + grad L_p to (u_l / (1 + mu), delta v_l / (delta + mu)). This point is farther
    from the line to the local minimum if delta is smaller, i.e. if the client's data determine v less.
    FedSOL (Lambda = 1) descends along grad L_local at w + rho g_p / |g_p| to the point of that line at distance rho
    from its end, for any delta.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

DELTA, MU, RHO, LR, STEPS = 0.1, 1.0, 0.5, 0.01, 4000
MINIMUM = torch.tensor([1.0, 1.0], dtype=torch.float64)
CURVATURE = torch.tensor([1.0, DELTA], dtype=torch.float64)
EQUILIBRIA = {"FedProx": MINIMUM * CURVATURE / (CURVATURE + MU), "FedSOL": MINIMUM * (1 - RHO / MINIMUM.norm())}


def loss(w: Tensor) -> Tensor:
    """Return L_local.

    Args:
        w: (..., 2) weights.

    Returns:
        (...) losses.
    """
    return ((w - MINIMUM).square() * CURVATURE).sum(-1) / 2


def local_gradient(w: Tensor) -> Tensor:
    """Return the gradient (2,) of L_local at w (2,)."""
    return (w - MINIMUM) * CURVATURE


def fedprox_direction(w: Tensor) -> Tensor:
    """Return FedProx's direction (2,) at w (2,)."""
    return local_gradient(w) + MU * w


def fedsol_direction(w: Tensor) -> Tensor:
    """Return FedSOL's direction (2,) at w (2,)."""
    g = MU * w  # of L_p; at the global model it is 0, and nothing is perturbed
    return local_gradient(w + RHO * g / g.norm() if g.norm() > 1e-10 else w)


def descend(direction: Callable[[Tensor], Tensor]) -> Tensor:
    """Return all points of gradient descent from (0, 0), (STEPS + 1, 2)."""
    points = [torch.zeros(2, dtype=torch.float64)]
    for _ in range(STEPS):
        points.append(points[-1] - LR * direction(points[-1]))
    return torch.stack(points)


def draw(paths: dict[str, Tensor], to: Path) -> None:
    """Draw the paths and equilibria on the contours of the local loss."""
    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    axes = figure.subplots()
    axis = torch.linspace(-0.1, 1.2, 131, dtype=torch.float64)
    height = loss(torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1))
    axes.contour(axis, axis, height, levels=12, colors="0.8", linewidths=0.8)
    axes.plot(*zip((0, 0), MINIMUM.tolist(), strict=True), ":", color="0.4", label="line to the local minimum")
    for (name, points), dash in zip(paths.items(), ("-", "--"), strict=True):
        (line,) = axes.plot(*points.T, dash, label=f"path of {name}")
        axes.plot(*EQUILIBRIA[name], "o", color=line.get_color(), markersize=8, label=f"equilibrium of {name}")
    axes.plot(0, 0, "s", label="global model, the start")
    axes.plot(*MINIMUM, "*", markersize=13, label="local minimum")
    axes.set(xlabel="weight $u$", ylabel="weight $v$", aspect="equal")
    axes.legend(loc="upper left", fontsize="small", framealpha=1)
    figure.savefig(to, dpi=150, metadata={"Software": None})


def main() -> None:
    """Parse the command line, print the end points, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("figures"))
    to = parser.parse_args().to
    to.mkdir(parents=True, exist_ok=True)
    paths = {"FedProx": descend(fedprox_direction), "FedSOL": descend(fedsol_direction)}
    for name, points in paths.items():
        end, cosine = points[-1], torch.cosine_similarity(points[-1], MINIMUM, dim=0)
        equilibrium = ", ".join(f"{x:.4f}" for x in EQUILIBRIA[name].tolist())
        print(
            f"{name} ends at {end[0]:.4f}, {end[1]:.4f} (equilibrium {equilibrium}), cosine to the minimum {cosine:.4f}"
        )
    draw(paths, to / "toy.png")


if __name__ == "__main__":
    main()
