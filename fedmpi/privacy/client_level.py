"""Differential privacy of clients: the bound on uploads, and the noise that rank 0 adds to their sum.

With x_k the complete upload of client k as one vector, its weight a_k in [0, 1], and W the expected sum of the weights
of a cohort, which does not depend on the cohort that was drawn,

    release = sum_k a_k clip(x_k) / W + N(0, (z S / W)^2),        clip(x) = x min(1, S / ||x||)                      (1)

for the clip norm S and the noise multiplier z (McMahan, Ramage, Talwar, Zhang. Learning Differentially Private
Recurrent Language Models. ICLR 2018. https://arxiv.org/abs/1710.06963). The data of one client change the sum by at
most S. With adaptive clipping S follows the quantile q of the norms (Andrew, Thakkar, McMahan, Ramaswamy.
Differentially Private Learning with Adaptive Clipping. NeurIPS 2021. https://arxiv.org/abs/1905.03871):

    b_k = 1/2 if ||x_k|| <= S, else -1/2
    B   = 1/2 + (sum_k a_k b_k + N(0, s^2)) / W,        S <- S exp(-lr (B - q))                                      (2)
    z'  = (z^-2 - (2 s)^-2)^-1/2 replaces z in (1), so that the releases (1) and (2) together cost as much as z      (3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Factor of the clip norm that makes up for the rounding of the scaled entries to float32.
ROUNDING_MARGIN = 1 - 2.0**-22


@dataclass(frozen=True)
class AdaptiveClip:
    """Adaptive clipping, equation (2)."""

    quantile: float  # the share q of the uploads that shall not be clipped
    lr: float
    count_noise: float  # the standard deviation s of the noise on the number of uploads that were not clipped

    def next_clip(self, clip: float, mean: float) -> float:
        """Return the clip norm of the next round.

        Args:
            clip: the clip norm S of this round.
            mean: (sum_k a_k b_k + noise) / W.
        """
        return clip * math.exp(-self.lr * (0.5 + mean - self.quantile))


@dataclass(frozen=True)
class ClientMechanism:
    """The settings of differential privacy of clients."""

    clip: float  # the clip norm S; with adaptive clipping, that of the first round
    noise_multiplier: float  # z
    members: int  # the expected number of clients in a cohort
    total_weight: float  # W, the expected sum of their weights
    adaptive: AdaptiveClip | None = None

    @property
    def update_noise_multiplier(self) -> float:
        """The noise multiplier of the sum of uploads: z, or z' of equation (3)."""
        z = self.noise_multiplier
        return z if self.adaptive is None else (z**-2 - (2 * self.adaptive.count_noise) ** -2) ** -0.5


def clip_vector(x: Tensor, clip: Tensor | float) -> Tensor:
    """Scale a vector in place so that its norm is at most `clip`; a vector with nan or inf becomes zero.

    A vector is also set to zero if its norm is so large that the scale would be a subnormal number, which is too
    inexact for the bound. Nothing is copied from a GPU to the CPU.

    Returns:
        () b_k of equation (2): 1/2 if the norm was at most `clip` before, otherwise -1/2.
    """
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    within = norm <= clip  # false if the norm is nan
    scale = torch.where(within, torch.ones_like(norm), ROUNDING_MARGIN * clip / norm)
    x.mul_(scale.to(x.dtype)).masked_fill_(~(scale >= torch.finfo(x.dtype).tiny), 0)
    return within.to(x.dtype) - 0.5
