"""FedLD's aggregate: updates along their leading principal directions, from their Gram matrix."""

from __future__ import annotations

from math import floor

import torch
from torch import Tensor

from fedmpi.flat.linear import combine, gram


def principal_coefficients(
    K: Tensor, p: Tensor, keep: float = 0.8, share: str = "l2", correction: str = "text"
) -> Tensor:
    """Coefficients of the clients' updates in FedLD's aggregate.   (m, m), (m,) -> (m,) float64.

    K / m = E diag(lam) E' (largest first); v_l = G e_l / sqrt(m lam_l) is the l-th principal direction, and
    g_il = <g_i, v_l> v_l the projection of client i's update on it. The first L = max(1, floor(keep m)) directions are
    kept, at most the numerical rank; `text` keeps those too whose eigenvalue is that of the L-th, else the kept space
    would be chance. Two readings of how lengths are corrected:
        text   u_i = sum_l lam_l g_il,   g_i' = ||g_i|| u_i / ||u_i||            the weighted sum is corrected
        axis   g_i' = ||g_i|| sum_l omega_l g_il / ||g_il||                      each projection is
               omega_l = lam_l / ||lam_1..L||_2 (share="l2"), or lam_l / sum_z lam_z (share="sum")
    and sum_i p_i g_i' = G c. `text`, and `axis` with l2, keep every length: ||g_i'|| = ||g_i||; `sum` shortens them, to
    0.28 of it where ten updates are orthogonal. `text` depends on the space of the kept directions alone: equal
    eigenvalues do no harm, and it is continuous in the updates but where lam_L and lam_L+1 cross; `axis` keeps only
    signs. Nothing of size d is formed here. A projection that is zero up to rounding (cosine <= 1e-9) adds nothing, an
    update that has no other adds nothing; all-zero updates give zeros; nan gives nan.
    Zeng et al., FedLD, MICCAI 2024: Eq. 7 as printed is `axis`, the sentence before it `text`.
    """
    m = len(K)
    if not K.isfinite().all():
        return K.new_full((m,), torch.nan)  # a client diverged; the engine names it
    lam, E = torch.linalg.eigh(K / m)
    lam, E = lam.flip(0).clamp(min=0), E.flip(1)
    if lam[0] == 0:
        return torch.zeros_like(lam)
    L = max(1, floor(keep * m + 1e-9))
    if correction == "text":
        L = int((lam >= lam[L - 1] - 1e-10 * lam[0]).sum())
    L = min(L, int((lam > 1e-10 * lam[0]).sum()))
    top, E = lam[:L], E[:, :L]  # (L,), (m, L)
    lengths = K.diagonal().clamp(min=0).sqrt()  # (m,)
    along = (m * top).sqrt() * E  # (m, L) <g_i, v_l>
    along = along * (along.abs() > 1e-9 * lengths[:, None])
    if correction == "text":
        u = (top * along).square().sum(1).sqrt()  # (m,) ||u_i||
        scale = torch.where(u > 0, p.double() * lengths / u.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        return (E / (m * top).sqrt()) @ (top * (scale @ along))
    omega = top / (lam.sum() if share == "sum" else top.norm())
    return (E * (omega / (m * top).sqrt())) @ ((p.double() * lengths) @ along.sign())


def principal_mean(G: Tensor, p: Tensor, keep: float = 0.8, share: str = "l2", correction: str = "text") -> Tensor:
    """FedLD's aggregate of updates G (m, d) with weights p (m,) -> (d,).   See `principal_coefficients`.

    >>> principal_mean(torch.tensor([[2.0, 0, 0], [0, 1, 0]]), torch.tensor([0.5, 0.5]), keep=1.0)
    tensor([1.0000, 0.5000, 0.0000])
    """
    return combine(G, principal_coefficients(gram(G), p, keep, share, correction))
