"""Gradient harmonization: removal of conflicts between updates, computed from their Gram matrix.

Two updates are in conflict if their inner product is negative. G (m, d) contains the m updates as rows. The modified
updates g_i are represented by their coefficients: the g_i are the rows of C G, where row i of C (m, m) belongs to g_i.
With K = G G' (m, m), all inner products are entries of P = C K C', and no vector of size d is computed.
"""

import torch
from torch import Tensor

CODE_EPS = 1e-7  # added to squared lengths, as in the code of FedLD's authors


def harmonize_pairs(K: Tensor, p: Tensor) -> Tensor:
    """Return the coefficients of the weighted mean of the updates after removal of pairwise conflicts (FedGH).

    Initially, g_i is the update of client i. Then, for all i < j in order, with the current values a = g_i and b = g_j:
    if <a, b> < 0,

        g_i <- a - (<a, b> / ||b||^2) b,        g_j <- b - (<a, b> / ||a||^2) a

    The result is sum_i p_i g_i. Inner products that are zero up to rounding (at least -1e-12 times the product of the
    lengths of the original updates) do not count as conflicts.

    Args:
        K: (m, m), the Gram matrix of the updates.
        p: (m,), the weights of the updates.

    Returns:
        (m,) float64.

    Zhang, Sun, Chen: FedGH, 2023, https://arxiv.org/abs/2309.06692

    >>> G = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    >>> harmonize_pairs(G @ G.T, torch.tensor([0.5, 0.5])) @ G.double()
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    m, K = len(K), K.double()
    C, P, lengths = torch.eye(m, dtype=torch.float64), K.clone(), K.diagonal().clamp(min=0).sqrt()
    for i in range(m):
        for j in range(i + 1, m):
            ab = float(P[i, j])
            if not ab < -1e-12 * float(lengths[i] * lengths[j]):
                continue
            projection = torch.tensor([[1.0, -ab / float(P[j, j])], [-ab / float(P[i, i]), 1.0]], dtype=torch.float64)
            pair = [i, j]
            C[pair] = projection @ C[pair]
            P[pair] = projection @ P[pair]
            P[:, pair] = P[:, pair] @ projection.T
    return p.double() @ C


def harmonize_as_in_fedld_code(K: Tensor, history_products: Tensor) -> Tensor:
    """Return the coefficients of the aggregate of FedGH, as computed in the code of FedLD's authors.

    Let h be the running mean of earlier directions of the server step. While there are more than two vectors, they are
    sorted by their inner product with h. The first vector is paired with the last, the second with the second to last,
    and so on; a vector in the middle is left unchanged. The conflict of each pair is removed, and the pair is replaced
    by its sum. If the last two vectors are in conflict, the first is made orthogonal to the second, and the second is
    then made orthogonal to the modified first. Their sum is divided by m.

    Args:
        K: (m, m), the Gram matrix of the updates g_i.
        history_products: (m,), the inner products <g_i, h>.

    Returns:
        (m,) float64.
    """
    m, K = len(K), K.double()

    def product(a: Tensor, b: Tensor) -> float:
        return float(a @ K @ b)

    def project_out(a: Tensor, b: Tensor, ab: float) -> Tensor:
        return a - ab / (product(b, b) + CODE_EPS) * b

    rows = torch.eye(m, dtype=torch.float64)
    while len(rows) > 2:
        rows = rows[(rows @ history_products.double()).argsort(descending=True, stable=True)]
        half, sums = len(rows) // 2, []
        for a, b in zip(rows[:half], rows.flip(0)[:half], strict=True):
            ab = product(a, b)
            sums.append(project_out(a, b, ab) + project_out(b, a, ab) if ab < 0 else a + b)
        rows = torch.stack([*sums, *rows[half : len(rows) - half]])
    if len(rows) == 2 and (ab := product(*rows)) < 0:
        first = project_out(rows[0], rows[1], ab)
        rows = torch.stack([first, project_out(rows[1], first, ab)])
    return rows.sum(0) / m
