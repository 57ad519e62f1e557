"""Class prototypes and mixtures of heads: pure functions of FedProto and FedPAC.   c classes, z features, m clients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from scipy.optimize import nnls
from torch import Tensor


def class_sums(rows: Iterable[tuple[Tensor, Tensor, Tensor]], classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per class: sum of z (c, z), count (c,), sum of ||z||^2 (c,).   rows: (z, outputs, y), batch after batch"""
    totals: tuple[Tensor, Tensor, Tensor] | None = None
    for z, _, y in rows:
        totals = totals or (z.new_zeros(classes, z.shape[1]), z.new_zeros(classes), z.new_zeros(classes))
        for total, value in zip(totals, (z, z.new_ones(len(y)), z.square().sum(1)), strict=True):
            total.index_add_(0, y, value)
    assert totals is not None  # a client has at least one sample
    return totals


def class_means(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Means of classes that occur, zeros for the others; and which occur.   (c, z), (c,) -> (c, z), (c,) of 0 or 1."""
    present = (counts > 0).to(sums.dtype)
    return sums / counts.clamp(min=1)[:, None], present


def prototype_loss(z: Tensor, y: Tensor, protos: Tensor, known: Tensor) -> Tensor:
    """MSE(z, P_y), mean over B and z; samples whose class has no prototype add 0.   (B, z), (B,), (c, z), (c,) -> ()"""
    return ((z - protos[y]).square() * known[y][:, None]).mean()


def simplex_minimum(P: Tensor) -> Tensor:
    """argmin_a a' P a  subject to  a >= 0, sum a = 1,  P (m, m) symmetric positive semidefinite -> (m,) float64.

    The optimality conditions are those of  min_{x >= 0} x' P x / 2 - sum x  with a = x / sum x; with P = R' R that is a
    non-negative least squares problem, solved exactly by its active-set method.

    >>> simplex_minimum(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    m = len(P)
    if not P.isfinite().all():
        return torch.full((m,), torch.nan, dtype=torch.float64)  # a client diverged; the engine names it
    ridge = 1e-12 * P.diagonal().sum().clamp(min=1e-30) * torch.eye(m, dtype=torch.float64)
    R = torch.linalg.cholesky(P.double() + ridge, upper=True)
    b = torch.linalg.solve_triangular(R.T, torch.ones(m, 1, dtype=torch.float64), upper=False)[:, 0]
    x, _ = nnls(R.numpy(), b.numpy())
    return torch.from_numpy(x / x.sum())


def head_mixture(h: Tensor, V: Tensor, i: int) -> Tensor:
    """a_i = argmin_{a >= 0, sum a = 1} a' (diag V + Delta^i) a;  Delta^i_jl = sum_c <h_i[c] - h_j[c], h_i[c] - h_l[c]>.

    h (m, c, z), V (m,) -> (m,) float64. Entries up to 1e-3 count as zero, as in the FedPAC authors' code.
    """
    differences = (h[i] - h).flatten(1).double().cpu()  # (m, c z)
    a = simplex_minimum(V.double().cpu().diag() + differences @ differences.T)
    a = a * (a > 1e-3)
    return a / a.sum()
