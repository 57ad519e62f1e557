"""What is measured of the updates: how far local models move, against each other, and in which layers."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.probes.cohort import Cohort
from fedmpi.flat.layout import Layout, Segment


def of_gram(G: Tensor) -> dict[str, Any]:
    """What a Gram matrix (m, m) of updates tells; of one client there are no pairs: None.

    >>> row = of_gram(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
    >>> row["divergence"], row["conflicts"], round(row["consistency"], 4), row["spectrum"]
    (1.0, 1.0, 1.7321, [1.5, 0.5])
    """
    G = G.double()
    norms = G.diagonal().clamp(min=0).sqrt()
    i, k = torch.triu_indices(len(G), len(G), offset=1)
    distances = (G[i, i] + G[k, k] - 2 * G[i, k]).clamp(min=0).sqrt()
    cosines = G / (norms[:, None] * norms[None, :])  # nan where a client has not moved
    pairs, some = cosines[i, k], len(i) > 0
    pairs = pairs[~pairs.isnan()]
    finite = bool(G.isfinite().all())  # else a client has diverged, and the decomposition would raise
    return {
        "divergence": norms.mean().item(),
        "consistency": distances.mean().item() if some else None,
        "cosine": pairs.mean().item() if len(pairs) else None,
        "conflicts": (pairs < 0).double().mean().item() if len(pairs) else None,
        "norms": norms.tolist(),
        "spectrum": torch.linalg.eigvalsh(G).flip(0).tolist() if finite else [torch.nan] * len(G),
        "cosines": cosines.tolist(),
    }


def measure_drift(c: Cohort) -> dict[str, Any]:
    """How far local models move, and against each other.

    With updates d_k = w_k - w0 and G = (d_i . d_k): divergence, the mean of |d_k|; consistency, the mean of |w_i - w_k|
    over pairs (FedSOL, Fig. 6); cosines of pairs, the share of those below zero (conflicts), and the spectrum of G.

    G is made of rows: a rank has those of its own clients.
    """
    own: dict[int, list[Tensor]] = {k: [] for k in c.moved}
    for _, d in c.updates():
        for k, mine in c.moved.items():
            own[k].append(mine.double() @ d.double())
    rows = c.gather({k: torch.stack(row) for k, row in own.items()}, len(c.members))
    return {} if c.comm.rank else of_gram((rows + rows.T) / 2)


def layers(layout: Layout) -> dict[str, list[Segment]]:
    """The tensors of each layer: those that share all of their name but its last word."""
    found = groupby(layout.segments, key=lambda s: s.name.rpartition(".")[0] or s.name)
    return {name: list(tensors) for name, tensors in found}


def strength(moved: list[Tensor], columns: bool = False) -> Tensor:
    """Mean of Lambda over a layer's tensors w - w0, ().

    >>> strength([torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 3.0]])])  # mean of 0, .267, .535, .802
    tensor(0.4009, dtype=torch.float64)
    """
    moved = [m.double() for m in moved]
    n = sum(m.numel() for m in moved)
    whole = torch.cat([m.flatten() for m in moved]).norm()
    norms = [m.norm(dim=0, keepdim=True) if columns else whole for m in moved]
    return (
        torch.stack([(m.abs() / norm.clamp(min=1e-12)).sum() for m, norm in zip(moved, norms, strict=True)]).sum() / n
    )


def measure_layers(c: Cohort) -> dict[str, Any]:
    """Which layers local training moves, and how evenly (FedSOL, Fig. 5b).

        Lambda^(l) = |w^(l) - w0^(l)| / ||w^(l) - w0^(l)||    elementwise, FedSOL's Eq. 7, of each local model and layer
    A layer is weight and bias together. The mean of its n entries is at most 1/sqrt(n), which is reached where all have
    moved alike: a small layer has a larger one than a wide layer, whatever the data. `evenness` is mean times sqrt(n);
    `columns` is the mean with norms along the first dimension of each tensor alone, as the authors' code has it.

    Means over the clients, layer by layer in the model's order.
    """
    of, own = layers(c.trainer.model.layout), {}
    for k, d in c.moved.items():
        wide = d.double()
        moved = [[s.view(wide) for s in tensors] for tensors in of.values()]
        lengths = [torch.cat([m.flatten() for m in each]).norm() for each in moved]
        own[k] = torch.stack([*map(strength, moved), *(strength(each, columns=True) for each in moved), *lengths])
    rows = c.gather(own, 3 * len(of))
    if c.comm.rank:
        return {}
    n = torch.tensor([sum(s.stop - s.start for s in tensors) for tensors in of.values()])
    strengths, columns, norms = rows.mean(0).split(len(of))
    return {
        "layers": list(of),
        "entries": n.tolist(),
        "strength": strengths.tolist(),
        "evenness": (strengths * n.double().sqrt()).tolist(),
        "columns": columns.tolist(),
        "norm": norms.tolist(),
    }
