"""Class prototypes and mixtures of heads (FedProto, FedPAC).

Shapes: c classes, z features, m clients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from scipy.optimize import nnls
from torch import Tensor


def class_sums(rows: Iterable[tuple[Tensor, Tensor, Tensor]], classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each class, the sum of its features (c, z), its number of samples (c,) and its sum of ||z||^2 (c,).

    Args:
        rows: an iterable of batches, each with features z, outputs and labels y.
        classes: the number of classes c.
    """
    totals: tuple[Tensor, Tensor, Tensor] | None = None
    for z, _, y in rows:
        totals = totals or (z.new_zeros(classes, z.shape[1]), z.new_zeros(classes), z.new_zeros(classes))
        for total, value in zip(totals, (z, z.new_ones(len(y)), z.square().sum(1)), strict=True):
            total.index_add_(0, y, value)
    assert totals is not None  # a client has at least one sample
    return totals


def class_means(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean feature of each class and a mask of the classes that have samples.

    Args:
        sums: (c, z) sums of features.
        counts: (c,) numbers of samples.

    Returns:
        (c, z) means, zero for classes without samples; (c,) mask, 1 for classes with samples.
    """
    present = (counts > 0).to(sums.dtype)
    return sums / counts.clamp(min=1)[:, None], present


def prototype_loss(z: Tensor, y: Tensor, protos: Tensor, known: Tensor) -> Tensor:
    """Return the mean squared error () between features and the prototypes of their classes, over all entries.

    Args:
        z: (B, z) features.
        y: (B,) labels.
        protos: (c, z) prototypes.
        known: (c,) 1 for classes that have a prototype; samples of other classes add 0 to the mean.
    """
    return ((z - protos[y]).square() * known[y][:, None]).mean()


def minimize_on_simplex(P: Tensor) -> Tensor:
    """Return the weights a (m,) float64 that minimise a' P a subject to a >= 0 and sum a = 1.

    Up to scaling, the solution is that of  min_{x >= 0} x' P x / 2 - sum x:  a = x / sum x. With P = R' R this is a
    non-negative least squares problem, which an active-set method solves exactly.

    Args:
        P: (m, m) symmetric positive semidefinite matrix.

    >>> minimize_on_simplex(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    m = len(P)
    if not P.isfinite().all():
        return torch.full((m,), torch.nan, dtype=torch.float64)  # a client has diverged; the engine reports which one
    ridge = 1e-12 * P.diagonal().sum().clamp(min=1e-30) * torch.eye(m, dtype=torch.float64)
    R = torch.linalg.cholesky(P.double() + ridge, upper=True)
    b = torch.linalg.solve_triangular(R.T, torch.ones(m, 1, dtype=torch.float64), upper=False)[:, 0]
    x, _ = nnls(R.numpy(), b.numpy())
    return torch.from_numpy(x / x.sum())


def head_mixing_weights(h: Tensor, V: Tensor, i: int) -> Tensor:
    """Return the weights (m,) float64 with which FedPAC mixes the cohort's heads into that of client i.

    a_i = argmin_{a >= 0, sum a = 1} a' (diag V + Delta^i) a;  Delta^i_jl = sum_c <h_i[c] - h_j[c], h_i[c] - h_l[c]>.
    Entries up to 1e-3 are set to zero, as in the FedPAC authors' code.

    Args:
        h: (m, c, z) class means times class frequencies.
        V: (m,) variance terms.
        i: position of the client in the cohort.
    """
    differences = (h[i] - h).flatten(1).double().cpu()  # (m, c z)
    a = minimize_on_simplex(V.double().cpu().diag() + differences @ differences.T)
    a = a * (a > 1e-3)
    return a / a.sum()
