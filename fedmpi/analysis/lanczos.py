"""Extreme eigenvalues of a symmetric matrix that is only known by its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_STEPS = 200


@dataclass(frozen=True)
class Eigen:
    values: Tensor  # (k,) float64, falling
    vectors: Tensor  # (k, d), of unit length; the sign is arbitrary
    steps: int
    residual: float  # the largest of |A v - lambda v| over the largest |lambda|


def largest(
    product: Callable[[Tensor], Tensor], like: Tensor, k: int, generator: torch.Generator, tolerance: float = 1e-3
) -> Eigen:
    """The k algebraically largest eigenvalues of A (d, d) with their vectors, by Lanczos with full reorthogonalisation.

    Args:
        product: v (d,) -> A v.
        like: a tensor (d,) of the type and device to work with.
        tolerance: stop where every residual |beta s_last| is below it, relative to the largest |lambda|; at the latest
            after min(d, 200) steps.

    A repeated eigenvalue may be counted once.

    >>> A = torch.diag(torch.tensor([3.0, -5.0, 1.0, 2.0]))
    >>> largest(lambda v: A @ v, torch.zeros(4), 2, torch.Generator().manual_seed(0)).values.round(decimals=4).tolist()
    [3.0, 2.0]
    """
    d = like.numel()
    k, most = min(k, d), min(d, max(MOST_STEPS, 2 * k))
    basis = like.new_empty(most, d)
    diagonal: list[float] = []
    beside: list[float] = []
    v = _orthogonal(torch.randn(d, generator=generator).to(like), basis[:0])
    v /= v.norm()
    scale, theta, s = 0.0, torch.empty(0), torch.empty(0)
    while True:
        at = len(diagonal)
        basis[at] = v
        r = product(v)
        diagonal.append(float(r.double() @ v.double()))
        r = _orthogonal(r, basis[: at + 1])
        beta = float(r.double().norm())
        theta, s = torch.linalg.eigh(_tridiagonal(diagonal, beside))
        scale = max(scale, float(theta.abs().max()), 1e-30)
        residual = float((beta * s[-1, -k:].abs()).max()) / scale
        if (len(diagonal) >= k and residual < tolerance) or len(diagonal) == most:
            break
        if beta < 1e-6 * scale:  # the space is closed: what is orthogonal to it has eigenvectors of its own
            r, beta = _orthogonal(torch.randn(d, generator=generator).to(like), basis[: at + 1]), 0.0
        beside.append(beta)
        v = r / r.norm()
    vectors = s[:, -k:].flip(1).T.to(basis) @ basis[: len(diagonal)]
    return Eigen(theta[-k:].flip(0), vectors / vectors.norm(dim=1, keepdim=True), len(diagonal), residual)


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    i = torch.arange(len(beside))
    T[i, i + 1] = T[i + 1, i] = torch.tensor(beside, dtype=torch.float64)
    return T


def _orthogonal(r: Tensor, basis: Tensor) -> Tensor:
    """r without its parts along the rows of basis; twice, since once leaves what rounding has made of it."""
    for _ in range(2):
        r = r - basis.T @ (basis @ r)
    return r
