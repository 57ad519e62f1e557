"""A federation of quadratic problems with closed-form solutions: client k minimises sum_j a_kj (x_j - b_kj)^2 / 2.

It is written as a user's plug-in, which configs name as `tests/quadratics.py:point` and so on: the model is one float64
vector x, the targets are ignored, and the task has no base class and declares no names of metrics.
"""

from pathlib import Path

import torch
from torch import nn

from fedmpi.data.dataset import Dataset

# f_0 = x^2 / 2, f_1 = 3 (x - 4)^2 / 2: the minimum of the sum is at 12 / 4 = 3. Tests make 10 steps of .05 from x = 1.
TWO = {"a": [[1.0], [3.0]], "b": [[0.0], [4.0]], "copies": [1, 1]}


class Point(nn.Module):
    """A model with the parameters x (n,), which returns x for every sample."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, rows):
        return self.x.expand(len(rows), -1)  # (B, n)


def point(input_shape: tuple[int, ...], classes: int, start: list[float]) -> Point:
    """Return the model with x = `start`."""
    return Point(start)


def bowls(root: Path, *, a: list[list[float]], b: list[list[float]], copies: list[int]) -> Dataset:
    """Return data with one row (a_k, b_k) per client, repeated `copies[k]` times to change only the client's weight."""
    sites = torch.arange(len(copies)).repeat_interleave(torch.tensor(copies))
    rows = torch.cat([torch.tensor(a), torch.tensor(b)], 1)[sites]  # (N, 2 n)
    y = torch.zeros(len(rows))
    return Dataset(rows, y, rows, y, classes=1, site=sites, test_site=sites)


class Bowl:
    """The task whose loss is the mean over rows of sum_j a_j (x_j - b_j)^2 / 2; its metrics are the entries of x."""

    def __init__(self, classes):
        pass

    def loss(self, model, x, y):
        a, b = x.chunk(2, 1)
        return (a * (model(x) - b).square()).sum(1).mean() / 2

    def metrics(self, outputs, y):
        return {f"x{j}": value for j, value in enumerate(outputs.mean(0).tolist())}
