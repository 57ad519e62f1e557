"""Server rules, which a config can select to replace the aggregation of the method.

A rule is a function `f(updates, server, **options)` that computes the direction of the server step, (s,), from the
gathered updates. Example: `server.rule: {name: principal, keep: 0.5}`.
"""

from __future__ import annotations

from math import floor
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmpi.aggregation import gradient_harmonization
from fedmpi.common.errors import UserError
from fedmpi.common.registry import PluginKind
from fedmpi.method.context import Server, Uploads

registry: dict[str, str] = {
    "geometric_median": "fedmpi.aggregation.rules:geometric_median",
    "harmonize": "fedmpi.aggregation.rules:harmonize",
    "krum": "fedmpi.aggregation.rules:krum",
    "mean": "fedmpi.aggregation.rules:mean",
    "median": "fedmpi.aggregation.rules:median",
    "principal": "fedmpi.aggregation.rules:principal",
    "trimmed_mean": "fedmpi.aggregation.rules:trimmed_mean",
}
KIND = PluginKind("server rule", registry, "server.rule", ("updates", "server"))


def mean(updates: Uploads, server: Server) -> Tensor:
    """Weighted mean of the updates (FedAvg)."""
    return updates.mean("dw")


def principal(
    updates: Uploads,
    server: Server,
    keep: Annotated[float, Field(gt=0, le=1)] = 0.8,
    share: Literal["sum", "l2"] = "l2",
    scope: Literal["model", "tensor"] = "model",
    correction: Literal["text", "axis"] = "text",
) -> Tensor:
    """Weighted mean of the updates after projection onto their leading principal directions and rescaling (FedLD).

    Args:
        keep: fraction of the m principal directions that is kept.
        scope: whether the directions are computed for the whole model (model) or for each tensor separately (tensor).
        correction: what is rescaled to the length of the client's update: the sum of the update's projections onto the
            directions, weighted by the eigenvalues (text, as the text of the paper says), or each projection
            separately, before they are summed (axis, as its equation 7 says).
        share: only for `correction: axis`; how the eigenvalues are normalised to become the weights of the projections:
            by the sum of all eigenvalues (sum), or by the Euclidean norm of those of the kept directions (l2).
    """
    if share == "sum" and correction == "text":
        raise UserError(
            "server.rule.share: sum has no effect with server.rule.correction: text; set server.rule.correction: "
            "axis, or remove server.rule.share"
        )
    if scope == "model":
        return updates.combine(principal_coefficients(updates.gram("dw"), updates.p, keep, share, correction))
    parts = []
    for span in ((segment.start, segment.stop) for segment in server.segments):
        c = principal_coefficients(updates.gram("dw", span), updates.p, keep, share, correction)
        parts.append(updates.combine(c, "dw", span))
    return torch.cat(parts) if parts else mean(updates, server)  # a method that shares no parameters has no segments


def harmonize(updates: Uploads, server: Server) -> Tensor:
    """Weighted mean of the updates, after conflicting pairs of updates have been made orthogonal (FedGH)."""
    return updates.combine(gradient_harmonization.harmonize_pairs(updates.gram("dw"), updates.p))


def median(updates: Uploads, server: Server) -> Tensor:
    """Coordinate-wise median of the updates, with equal weights for all clients (Yin 2018)."""
    return updates.trimmed_mean(0.5)


def trimmed_mean(updates: Uploads, server: Server, trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1) -> Tensor:
    """Coordinate-wise mean of the updates without the most extreme values, with equal weights (Yin 2018).

    Args:
        trim: fraction of the m values of a coordinate that is left out at each end: the floor(trim m) smallest and the
            floor(trim m) largest.
    """
    return updates.trimmed_mean(trim)


def krum(
    updates: Uploads,
    server: Server,
    byzantine: Annotated[int, Field(ge=0)] = 1,
    select: Annotated[int, Field(ge=1)] = 1,
) -> Tensor:
    """Update that is closest to the other updates (Krum), or mean of several such updates (Multi-Krum; Blanchard 2017).

    Args:
        byzantine: assumed number of Byzantine updates, whose values may be arbitrary.
        select: number of updates that are averaged; 1 for Krum.
    """
    return updates.combine(krum_coefficients(updates.gram("dw"), byzantine, select))


def geometric_median(
    updates: Uploads,
    server: Server,
    iterations: Annotated[int, Field(ge=1)] = 100,
    smooth: Annotated[float, Field(gt=0)] = 1e-6,
) -> Tensor:
    """Geometric median: the point with the smallest weighted sum of distances to the updates (RFA, Pillutla 2022).

    Args:
        iterations: maximum number of iterations of Weiszfeld's algorithm.
        smooth: lower bound on the distances by which the algorithm divides, relative to the mean distance of the
            updates from their mean.
    """
    return updates.combine(geometric_median_coefficients(updates.gram("dw"), updates.p, iterations, smooth))


def principal_coefficients(
    K: Tensor, p: Tensor, keep: float = 0.8, share: str = "l2", correction: str = "text"
) -> Tensor:
    """Return the coefficients c (m,), float64, with which the aggregate of FedLD combines the updates.

    g_i is the update of client i, and G has the updates as columns. Let K / m = E diag(lam) E' with the largest
    eigenvalue first. Then v_l = G e_l / sqrt(m lam_l) is the l-th principal direction, and g_il = <g_i, v_l> v_l is the
    projection of client i's update onto it. The first L = max(1, floor(keep m)) directions are kept, but no more than
    the numerical rank. `text` also keeps directions whose eigenvalue equals the L-th one, because the subspace would
    otherwise be arbitrary. The paper can be read in two ways:

        text    rescale the weighted sum of the projections:
                    u_i = sum_l lam_l g_il,   g_i' = ||g_i|| u_i / ||u_i||
        axis    rescale each projection:
                    g_i' = ||g_i|| sum_l omega_l g_il / ||g_il||
                    omega_l = lam_l / ||lam_1..L||_2 (share="l2"), or lam_l / sum(lam) (share="sum")

    The aggregate is sum_i p_i g_i' = G c. `text`, and `axis` with l2, preserve lengths: ||g_i'|| = ||g_i||. `axis` with
    `sum` shortens updates; ten orthogonal updates, for example, are shortened to 0.28 of their lengths. The result of
    `text` depends only on the subspace of the kept directions, so it does not matter which eigenvectors are chosen for
    equal eigenvalues. It is continuous in the updates unless the eigenvalues L and L + 1 cross. `axis` uses only the
    signs of projections. A projection that is zero up to rounding (cosine <= 1e-9) contributes nothing, and neither
    does an update whose projections are all zero. If all updates are zero, the coefficients are zero. NaN in the
    updates results in NaN coefficients.

    Args:
        K: (m, m), the Gram matrix of the updates.
        p: (m,), the weights of the updates.
        keep, share, correction: see `principal`.

    Zeng et al., FedLD, MICCAI 2024: Eq. 7 as printed is `axis`, the sentence before it is `text`.
    """
    m = len(K)
    if not K.isfinite().all():
        return K.new_full((m,), torch.nan)  # a client has diverged; the engine reports which one
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


def krum_coefficients(K: Tensor, byzantine: int, select: int) -> Tensor:
    """Return the coefficients (m,), float64, of the mean of the `select` updates that are closest to other updates.

    K is the Gram matrix (m, m). The score of update i is the sum of ||g_i - g_j||^2 over its m - f - 2 nearest
    updates j (at least one), where f = `byzantine`. The updates with the lowest scores are selected; of updates with
    equal scores, the first ones. The guarantee of the paper requires m >= 2 f + 3.
    Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries. NeurIPS 2017.
    https://arxiv.org/abs/1703.02757
    """
    m, K = len(K), K.double()
    lengths = K.diagonal()
    squares = (lengths[:, None] + lengths - 2 * K).clamp(min=0).fill_diagonal_(torch.inf)
    near = max(m - byzantine - 2, 1)
    scores = squares.sort(1).values[:, :near].sum(1).nan_to_num(nan=torch.inf)
    chosen = scores.argsort(stable=True)[:select]
    c = torch.zeros(m, dtype=torch.float64)
    c[chosen] = 1 / len(chosen)
    return c


def geometric_median_coefficients(K: Tensor, p: Tensor, iterations: int, smooth: float) -> Tensor:
    """Return the coefficients c (m,), float64, of the geometric median G c of the updates.

    K is the Gram matrix (m, m), p are the weights (m,), and G has the updates g_i as columns. The geometric median is
    the point v that minimises sum_i p_i ||g_i - v||. Weiszfeld's algorithm starts with c = p and repeats

        a_i = p_i / max(||g_i - G c||, nu),        c_i = a_i / sum_j a_j

    until c no longer changes; nu is `smooth` times the mean distance of the updates from their mean. The distances
    follow from ||g_i - G c||^2 = M_ii - 2 (M c)_i + c' M c, where M is the Gram matrix of the centred updates, i.e. of
    the updates minus their mean.
    Pillutla, Kakade, Harchaoui. Robust Aggregation for Federated Learning. 2022. https://arxiv.org/abs/1912.13445
    """
    p, K = p.double(), K.double()
    mean_products = K @ p
    K = K - mean_products[:, None] - mean_products + p @ mean_products
    nu = smooth * (p @ K.diagonal().clamp(min=0).sqrt())
    c = p
    for _ in range(iterations if nu > 0 else 0):
        distances = (K.diagonal() - 2 * K @ c + c @ K @ c).clamp(min=0).sqrt()
        before, c = c, p / distances.clamp(min=float(nu))
        c = c / c.sum()
        if (c - before).abs().max() < 1e-13:
            break
    return c
