"""The mean and deviation by which the targets of a regression are standardised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of training targets (n, ...): one of each for every number of a target, in order."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of_sums(cls, sums: Iterable[np.ndarray]) -> TargetScale:
        """Fit to the rows of `target_sums` of one site, or of several. A deviation of 0 becomes 1."""
        n, total, squares = np.sum(list(sums), axis=0).reshape(3, -1)
        mean = total / np.maximum(n, 1)
        variance = squares / np.maximum(n, 1) - mean**2
        varies = variance > 1e-12 * mean**2  # what rounding leaves of a constant is less
        return cls(tuple(mean.tolist()), tuple(np.sqrt(np.where(varies, variance, 1.0)).tolist()))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TargetScale:
        """Return the scale that a file holds as {"mean": [...], "deviation": [...]}."""
        return cls(tuple(map(float, facts["mean"])), tuple(map(float, facts["deviation"])))

    def beside(self, y: Tensor) -> Tensor:
        """Return (n, 3, ...): the targets y (n, ...), and the mean and deviation of each."""
        shape = (1, *y.shape[1:])
        mean, deviation = (torch.tensor(each, dtype=y.dtype).view(shape) for each in (self.mean, self.deviation))
        return torch.stack([y, mean.expand_as(y), deviation.expand_as(y)], dim=1)

    def original(self, outputs: Tensor) -> Tensor:
        """Convert standardised outputs (B, ...) to the unit of the targets."""
        shape = (1, *outputs.shape[1:])
        return outputs * outputs.new_tensor(self.deviation).view(shape) + outputs.new_tensor(self.mean).view(shape)


def target_sums(y: Tensor, counted: Tensor) -> np.ndarray:
    """Return (3 k,) float64: number, sum and sum of squares of the counted targets y (n, ...) of k numbers each."""
    y = (
        torch.where(counted, y.double(), 0.0).flatten(1)
        if y.ndim > 1
        else torch.where(counted, y.double(), 0.0)[:, None]
    )
    n = counted.double().view(y.shape).sum(0)
    return torch.cat([n, y.sum(0), y.square().sum(0)]).numpy()
