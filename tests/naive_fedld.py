"""A direct implementation of FedLD's server, as in its paper: loops over clients and directions, vectors in R^d.

The principal directions are computed by a singular value decomposition of the updates, not from their Gram matrix, so
that this code is independent of fedmpi's.
"""

import numpy as np


def principal_mean(G, p, keep=0.8, share="l2", correction="text"):
    """Return FedLD's server update (d,) from the updates G (m, d) in float64 and the weights p (m,).

    The singular values must be distinct; otherwise the directions are arbitrary.
    """
    m = len(G)
    U, s, _ = np.linalg.svd(G.T, full_matrices=False)  # (d, min), (min,)
    lam = np.zeros(m)
    lam[: len(s)] = s**2 / m
    kept = min(max(1, int(np.floor(keep * m + 1e-9))), int((lam > 1e-10 * lam[0]).sum()))
    mean = G.mean(0)
    omega = lam / (lam.sum() if share == "sum" else np.sqrt((lam[:kept] ** 2).sum()))
    total = np.zeros(G.shape[1])
    for i in range(m):
        revised = np.zeros(G.shape[1])
        for j in range(kept if correction == "text" else 0):  # sum first, then take the norm
            revised += lam[j] * (G[i] @ U[:, j]) * U[:, j]
        if np.linalg.norm(revised):
            revised *= np.linalg.norm(G[i]) / np.linalg.norm(revised)
        for j in range(kept if correction == "axis" else 0):
            v = U[:, j] * np.sqrt(m * lam[j])
            if v @ mean < 0:
                v = -v
            projection = (G[i] @ v) / (v @ v) * v
            if np.linalg.norm(projection) <= 1e-9 * np.linalg.norm(G[i]):
                continue
            revised += omega[j] * np.linalg.norm(G[i]) / np.linalg.norm(projection) * projection
        total += p[i] * revised
    return total
