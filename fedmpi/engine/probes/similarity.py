"""How alike what models make of the same samples is: linear CKA (Kornblith, Norouzi, Lee, Hinton, ICML 2019).

Of features Z_i (n, z_i), what the head is given, less their mean over the n samples:
    CKA(i, k) = |Z_k' Z_i|_F^2 / (|Z_i' Z_i|_F |Z_k' Z_k|_F)      = <K_i, K_k>,  K_i = Z_i Z_i' / |Z_i Z_i'|_F
1 for features that differ by a rotation and a scale, nan where a model's do not vary. On the samples of features.rows.
The smaller n against z, the nearer even unlike ones are to 1: to compare with others of the same n and z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.probes import features
from fedmpi.engine.probes.cohort import Cohort, Model

ROWS = 32  # of the kernels K (n, n) that are gathered at once: rank 0 holds m of them


def unit(z: Tensor) -> Tensor:
    """Centred features, scaled such that |Z Z'|_F = 1.   (n, z) -> (n, z) float64"""
    z = z.double() - z.double().mean(0)
    return z / (z.T @ z).norm().sqrt()


def cka(z: Tensor, other: Tensor) -> Tensor:
    """CKA () of two models' features (n, z), (n, z').

    >>> z = torch.eye(3)[:, :2]
    >>> round(cka(z, 2 * z.flip(1)).item(), 6), round(cka(z, z[:, :1]).item(), 6)
    (1.0, 0.790569)
    """
    return (unit(other).T @ unit(z)).square().sum()


def measure(c: Cohort) -> dict[str, Any]:
    """Of each local model with the global ones, where it was trained; between all of them at rank 0, which is sent some
    rows of their kernels at a time."""

    def of(model: Model) -> Tensor:
        return unit(features.outputs(c, model)[0])

    mine = {k: of(model) for k, model in c.mine.items()}
    both = [of(model) for model in (c.before, c.after)] if mine else []
    with_global = c.gather({k: torch.stack([cka(z, other) for other in both]) for k, z in mine.items()}, 2)
    m, n = len(c.members), len(features.rows(c))
    between = torch.zeros(m, m, dtype=torch.float64)
    for start in range(0, n, ROWS):
        stop = min(start + ROWS, n)
        kernels = c.gather({k: (z[start:stop] @ z.T).flatten() for k, z in mine.items()}, (stop - start) * n)
        if not c.comm.rank:
            between += kernels @ kernels.T
    if c.comm.rank:
        return {}
    i, k = torch.triu_indices(m, m, offset=1)
    pairs, (before, after) = between[i, k], with_global.T
    return {
        "samples": n,
        "pairs_mean": pairs.nanmean().item() if m > 1 else None,
        "before": before.tolist(),
        "before_mean": before.nanmean().item(),
        "after": after.tolist(),
        "after_mean": after.nanmean().item(),
        "matrix": between.tolist(),
    }
