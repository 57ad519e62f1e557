"""How far local models move, and against each other.

With updates d_k = w_k - w0 and G = (d_i . d_k): divergence, the mean of |d_k|; consistency, the mean of |w_i - w_k|
over pairs (FedSOL, Fig. 6); cosines of pairs, the share of those below zero (conflicts), and the spectrum of G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.probes.cohort import Cohort


def of_gram(G: Tensor) -> dict[str, Any]:
    """What a Gram matrix (m, m) of updates tells; of one client there are no pairs: None.

    >>> told = of_gram(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
    >>> told["divergence"], told["conflicts"], round(told["consistency"], 4), told["spectrum"]
    (1.0, 1.0, 1.7321, [1.5, 0.5])
    """
    G = G.double()
    norms = G.diagonal().clamp(min=0).sqrt()
    i, k = torch.triu_indices(len(G), len(G), offset=1)
    apart = (G[i, i] + G[k, k] - 2 * G[i, k]).clamp(min=0).sqrt()
    cosines = G / (norms[:, None] * norms[None, :])  # nan where a client has not moved
    pairs, some = cosines[i, k], len(i) > 0
    pairs = pairs[~pairs.isnan()]
    finite = bool(G.isfinite().all())  # else a client came apart, and the decomposition would raise
    return {
        "divergence": norms.mean().item(),
        "consistency": apart.mean().item() if some else None,
        "cosine": pairs.mean().item() if len(pairs) else None,
        "conflicts": (pairs < 0).double().mean().item() if len(pairs) else None,
        "norms": norms.tolist(),
        "spectrum": torch.linalg.eigvalsh(G).flip(0).tolist() if finite else [torch.nan] * len(G),
        "cosines": cosines.tolist(),
    }


def measure(c: Cohort) -> dict[str, Any]:
    """G is made of rows: a rank has those of its own clients."""
    own: dict[int, list[Tensor]] = {k: [] for k in c.moved}
    for _, d in c.updates():
        for k, mine in c.moved.items():
            own[k].append(mine.double() @ d.double())
    rows = c.gather({k: torch.stack(row) for k, row in own.items()}, len(c.members))
    return {} if c.comm.rank else of_gram((rows + rows.T) / 2)
