"""Server rules that some wrong updates cannot carry away: pure functions, linear ones in Gram form."""

import torch
from torch import Tensor


def krum(K: Tensor, byzantine: int, select: int) -> Tensor:
    """Coefficients of the mean of the `select` updates that lie closest to others.   (m, m) -> (m,) float64

    score_i = sum of ||g_i - g_j||^2 over the m - f - 2 nearest j (at least one), f = byzantine; the lowest scores win,
    of equal ones the first. What the paper guarantees needs m >= 2 f + 3.
    Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries. NeurIPS 2017.
    https://arxiv.org/abs/1703.02757
    """
    m, K = len(K), K.double()
    lengths = K.diagonal()
    apart = (lengths[:, None] + lengths - 2 * K).clamp(min=0).fill_diagonal_(torch.inf)
    near = max(m - byzantine - 2, 1)
    scores = apart.sort(1).values[:, :near].sum(1).nan_to_num(nan=torch.inf)
    chosen = scores.argsort(stable=True)[:select]
    c = torch.zeros(m, dtype=torch.float64)
    c[chosen] = 1 / len(chosen)
    return c


def geometric_median(K: Tensor, p: Tensor, iterations: int, smooth: float) -> Tensor:
    """Coefficients of  argmin_v sum_i p_i ||g_i - v||.   (m, m), (m,) -> (m,) float64

    Weiszfeld's iteration   c_i <- (p_i / max(||g_i - G c||, nu)) / sum,   nu = smooth times the mean distance from the
    mean, until c is at rest; distances by  ||g_i - G c||^2 = K_ii - 2 (K c)_i + c' K c  with K taken about the mean.
    Pillutla, Kakade, Harchaoui. Robust Aggregation for Federated Learning. 2022. https://arxiv.org/abs/1912.13445
    """
    p, K = p.double(), K.double()
    to_mean = K @ p
    K = K - to_mean[:, None] - to_mean + p @ to_mean
    nu = smooth * (p @ K.diagonal().clamp(min=0).sqrt())
    c = p
    for _ in range(iterations if nu > 0 else 0):
        apart = (K.diagonal() - 2 * K @ c + c @ K @ c).clamp(min=0).sqrt()
        before, c = c, p / apart.clamp(min=float(nu))
        c = c / c.sum()
        if (c - before).abs().max() < 1e-13:
            break
    return c
