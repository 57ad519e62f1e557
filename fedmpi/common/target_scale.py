"""The mean and standard deviation with which the targets of a regression are standardised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of training targets (n, ...), one pair for each component of a target."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def from_sums(cls, sums: Iterable[np.ndarray]) -> TargetScale:
        """Compute the mean and standard deviation from the results of `sum_targets` at one or more sites.

        A standard deviation of 0 is replaced by 1.
        """
        n, total, squares = np.sum(list(sums), axis=0).reshape(3, -1)
        mean = total / np.maximum(n, 1)
        variance = squares / np.maximum(n, 1) - mean**2
        varies = variance > 1e-12 * mean**2  # a constant has a smaller variance, which is due to rounding
        return cls(tuple(mean.tolist()), tuple(np.sqrt(np.where(varies, variance, 1.0)).tolist()))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TargetScale:
        """Create the scale from a dictionary that was stored in a file: {"mean": [...], "deviation": [...]}."""
        return cls(tuple(map(float, values["mean"])), tuple(map(float, values["deviation"])))

    def stack_with_targets(self, y: Tensor) -> Tensor:
        """Stack targets y (n, ...) with the mean and standard deviation of each component; return (n, 3, ...)."""
        shape = (1, *y.shape[1:])
        mean, deviation = (torch.tensor(each, dtype=y.dtype).view(shape) for each in (self.mean, self.deviation))
        return torch.stack([y, mean.expand_as(y), deviation.expand_as(y)], dim=1)

    def to_original_units(self, outputs: Tensor) -> Tensor:
        """Convert standardised outputs (B, ...) back to the unit of the targets."""
        shape = (1, *outputs.shape[1:])
        return outputs * outputs.new_tensor(self.deviation).view(shape) + outputs.new_tensor(self.mean).view(shape)


def sum_targets(y: Tensor, counted: Tensor) -> np.ndarray:
    """Return the count, sum and sum of squares of each component of the targets, as `from_sums` needs them.

    Args:
        y: targets (n, ...) with k components each.
        counted: which entries to include, boolean, same shape as y.

    Returns:
        k counts, k sums and k sums of squares, (3 k,) float64.
    """
    y = (
        torch.where(counted, y.double(), 0.0).flatten(1)
        if y.ndim > 1
        else torch.where(counted, y.double(), 0.0)[:, None]
    )
    n = counted.double().view(y.shape).sum(0)
    return torch.cat([n, y.sum(0), y.square().sum(0)]).numpy()
