"""Averages of 5 and of 25 small linear models on their loss landscape.

Chen, Qiu. Extra Clients at No Extra Cost. 2025. https://arxiv.org/abs/2503.08652, Sec. 6.6, Fig. 1(b)

    python examples/paper_figures/gaussians.py --to figures

Samples x ~ N(y mu, I), y = +1 or -1 with probability 1/2 each, mu = (2, 2); the model w.x has two weights, and
    L(w) = E (w.x - y)^2 = w'A w - 2 w.mu + 1,   A = I + mu mu',   with its minimum at w* = A^-1 mu = mu / 9
The paper gives the means, the loss and the numbers 5 and 25. The other settings are our choice: covariance I, SAMPLES
per client, START for all clients, STEPS of full-batch gradient descent with learning rate LR.

The clients are independent, so the variance of an average of 25 models is a fifth of that of 5. The paper argues with
25 = 5^2, i.e. five clients and their 20 virtual clients; these are products of the same factors, and not independent.
`fedmpi analyse variance` measures how much of the factor 5 remains in a real network.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

MU = torch.tensor([2.0, 2.0], dtype=torch.float64)
A = torch.eye(2, dtype=torch.float64) + torch.outer(MU, MU)
OPTIMUM = torch.linalg.solve(A, MU)
START = torch.tensor([0.3, 0.1], dtype=torch.float64)
SAMPLES, STEPS, LR = 10, 30, 0.05
CLIENTS, REPETITIONS = (5, 25), 4000
MAX_DOTS = 400  # dots of a cloud; more would hide its shape


def loss(w: Tensor) -> Tensor:
    """Return L(w).

    Args:
        w: (..., 2) weights.

    Returns:
        (...) losses.
    """
    return ((w @ A) * w).sum(-1) - 2 * w @ MU + 1


def average_models(clients: int, seed: int) -> Tensor:
    """Return the mean of the trained models of that many clients, for each repetition, (REPETITIONS, 2)."""
    g = torch.Generator().manual_seed(1000 * seed + clients)
    y = torch.randint(2, (REPETITIONS, clients, SAMPLES), generator=g).double() * 2 - 1
    x = y[..., None] * MU + torch.randn(*y.shape, 2, generator=g, dtype=torch.float64)
    return train_models(x, y).mean(1)


def train_models(x: Tensor, y: Tensor) -> Tensor:
    """Return w after STEPS of  w <- w - LR grad mean (w.x - y)^2.

    Args:
        x: (..., n, 2) samples.
        y: (..., n) labels.

    Returns:
        (..., 2) weights.
    """
    square, cross = x.mT @ x / y.shape[-1], (x * y[..., None]).mean(-2)  # (..., 2, 2), (..., 2)
    w = START.expand_as(cross)
    for _ in range(STEPS):
        w = w - 2 * LR * ((square @ w[..., None])[..., 0] - cross)
    return w


def draw(models: dict[int, Tensor], path: Path) -> None:
    """Draw the clouds of averaged models on the contours of the loss."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, len(models), sharex=True, sharey=True)
    points = torch.cat([*models.values(), START[None], OPTIMUM[None]])
    low, high = points.amin(0), points.amax(0)
    margin = 0.15 * (high - low)
    x, y = (torch.linspace(*ends, 121, dtype=torch.float64) for ends in zip(low - margin, high + margin, strict=True))
    height, minimum = loss(torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)), loss(OPTIMUM)
    levels = (
        minimum + (height.max() - minimum) * torch.linspace(0, 1, 9, dtype=torch.float64)[1:] ** 2
    )  # closer lower down
    for axes, (clients, w) in zip(panels, models.items(), strict=True):
        lines = axes.contour(x, y, height, levels=levels.tolist(), colors="0.55", linewidths=0.8)
        axes.clabel(lines, fontsize="x-small", fmt="%.2f")
        axes.scatter(*w[:MAX_DOTS].T, s=9, alpha=0.5, linewidth=0, label=f"averages of {clients} clients")
        axes.plot(*START, "s", color="C2", label="start of every client")
        axes.plot(*OPTIMUM, "*", markersize=13, label="minimum of the loss")
        axes.set(xlabel="weight $w_1$", ylabel="weight $w_2$")
        axes.legend(loc="lower left", fontsize="small", framealpha=1)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    """Parse the command line, print the variances, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("figures"))
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    models = {m: average_models(m, options.seed) for m in CLIENTS}
    variances = [w.var(0).sum().item() for w in models.values()]
    for (m, w), variance in zip(models.items(), variances, strict=True):
        excess = (loss(w) - loss(OPTIMUM)).mean().item()
        print(f"averages of {m} models: variance {variance:.4g}, mean loss above the minimum {excess:.4g}")
    print(f"ratio of the variances: {variances[0] / variances[1]:.3g}")
    draw(models, options.to / "gaussians.png")


if __name__ == "__main__":
    main()
