"""Which layers local training moves, and how evenly (FedSOL, Fig. 5b).

    Lambda^(l) = |w^(l) - w0^(l)| / ||w^(l) - w0^(l)||        elementwise, FedSOL's Eq. 7, of each local model and layer
A layer is weight and bias together. The mean of its n entries is at most 1/sqrt(n), which is reached where all have
moved alike: a small layer has a larger one than a wide layer, whatever the data. `evenness` is mean times sqrt(n);
`columns` is the mean with norms along the first dimension of each tensor alone, as the authors' code has it.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.probes.cohort import Cohort
from fedmpi.flat.layout import Layout, Segment


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


def measure(c: Cohort) -> dict[str, Any]:
    """Means over the clients, layer by layer in the model's order."""
    of, own = layers(c.worker.model.layout), {}
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
