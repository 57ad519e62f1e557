"""Class weights and label smoothing of a classification, as torch.nn.CrossEntropyLoss has them.

L = sum_i [ (1 - e) w_{y_i} l_{i y_i} + e/C sum_c w_c l_ic ] / sum_i w_{y_i}       l_ic = -log softmax(f_i)_c
balanced:  w_c = n / (C n_c)         n_c of the n training samples are of class c, of C classes; 1 where n_c = 0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.common.errors import UserError


def balanced(counts: Tensor) -> Tensor:
    """(C,) float64 weights for training samples (C,) by class."""
    n = counts.double()
    return torch.where(n > 0, n.sum() / (len(n) * n.clamp(min=1)), 1.0)


class WeightedCrossEntropy:
    """The loss of logits f (B, C) and classes y (B,). Until `weigh` is called, balanced weights are 1."""

    def __init__(self, classes: int, weights: str | Sequence[float] | None, smoothing: float) -> None:
        if weights is not None and weights != "balanced" and len(weights) != classes:
            raise UserError(f"task.weights: {len(weights)} weights, but the data have {classes} classes; one a class")
        self.balances, self.smoothing = weights == "balanced", smoothing
        given = None if weights is None else [1.0] * classes if weights == "balanced" else weights
        self.weights = None if given is None else torch.tensor(given, dtype=torch.float64)

    @property
    def plain(self) -> bool:
        return self.weights is None and not self.smoothing

    def weigh(self, counts: Tensor) -> None:
        """Training samples (C,) of each class."""
        if self.balances:
            self.weights = balanced(counts)

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        if self.weights is not None and (self.weights.dtype, self.weights.device) != (f.dtype, f.device):
            self.weights = self.weights.to(f)  # once, not once a batch
        if self.plain:
            return functional.cross_entropy(f, y)
        loss = -f.log_softmax(1)  # not torch's: clients that train at once cannot call it (torch.vmap)
        w = torch.ones_like(f[0]) if self.weights is None else self.weights
        true = torch.zeros_like(f).scatter(1, y[:, None], 1.0)
        share = (1 - self.smoothing) * true + self.smoothing / f.shape[1]
        return (share * w * loss).sum() / (true * w).sum()
