"""A federation whose mathematics fits on a line: client k minimises f_k(x) = sum_j a_kj (x_j - b_kj)^2 / 2.

Written as a user would write it, and named in a config as `tests/quadratics.py:point` and so on: one float64 vector x
as the model, targets that mean nothing, a task that says neither what it derives from nor what its metrics are called.
"""

from pathlib import Path

import torch
from torch import nn

from fedmpi.data.dataset import Dataset

# f_0 = x^2 / 2, f_1 = 3 (x - 4)^2 / 2: the sum is least at 12 / 4 = 3. The tests take 10 steps of .05 from x = 1.
TWO = {"a": [[1.0], [3.0]], "b": [[0.0], [4.0]], "copies": [1, 1]}


class Point(nn.Module):
    """x (n,), the same answer to every sample."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, rows):
        return self.x.expand(len(rows), -1)  # (B, n)


def point(input_shape: tuple[int, ...], classes: int, start: list[float]) -> Point:
    """A point that starts at `start`."""
    return Point(start)


def bowls(root: Path, *, a: list[list[float]], b: list[list[float]], copies: list[int]) -> Dataset:
    """One row (a_k, b_k) a client; it stands `copies[k]` times, which changes the client's weight and nothing else."""
    sites = torch.arange(len(copies)).repeat_interleave(torch.tensor(copies))
    rows = torch.cat([torch.tensor(a), torch.tensor(b)], 1)[sites]  # (N, 2 n)
    y = torch.zeros(len(rows))
    return Dataset(rows, y, rows, y, classes=1, site=sites, test_site=sites)


class Bowl:
    """mean over rows of sum_j a_j (x_j - b_j)^2 / 2; its figures are the coordinates of x."""

    def __init__(self, classes):
        pass

    def loss(self, model, x, y):
        a, b = x.chunk(2, 1)
        return (a * (model(x) - b).square()).sum(1).mean() / 2

    def metrics(self, outputs, y):
        return {f"x{j}": value for j, value in enumerate(outputs.mean(0).tolist())}
