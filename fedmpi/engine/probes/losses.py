"""What the loss of the global model is made of (FedLD, Eq. 2).

M[j, i] = L_j(w_i), mean loss of client i's local model on client j's training samples; l_j = L_j(w), w aggregated:
    local        sum_i p_i M[i, i]
    shift        sum_ij p_j p_i (M[j, i] - M[i, i])       other clients have other samples
    aggregation  sum_i p_i (sum_j p_j l_j - sum_j p_j M[j, i])       an average is none of the models that it is of
They add up to the loss of the global model, sum_j p_j l_j. As printed the third one has L_i(w_i), and then they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.probes.cohort import Cohort


def decomposition(M: Tensor, l: Tensor, p: Tensor) -> dict[str, float]:  # noqa: E741  the paper's letter
    """M (m, m), l (m,) and weights p (m,) that add up to one, float64.

    >>> decomposition(torch.tensor([[1.0, 3.0], [2.0, 1.0]]), torch.tensor([1.5, 2.0]), torch.tensor([0.5, 0.5]))
    {'local': 1.0, 'shift': 0.75, 'aggregation': 0.0, 'total': 1.75}
    """
    M, l, p = M.double(), l.double(), p.double()  # noqa: E741
    local, total = p @ M.diagonal(), p @ l
    shift = p @ (M - M.diagonal()[None, :]) @ p
    aggregation = p @ (total - M.T @ p)
    return {"local": local.item(), "shift": shift.item(), "aggregation": aggregation.item(), "total": total.item()}


def measure(c: Cohort) -> dict[str, Any]:
    """The three parts, and the matrix M of which they are made; m^2 evaluations, shared among the ranks."""
    own: dict[int, list[float]] = {k: [] for k in c.mine}
    for _, model in (*c.models(), (None, c.after)):
        for k in own:
            own[k].append(c.train_loss(model, k))
    m = len(c.members)
    rows = c.gather({k: torch.tensor(row, dtype=torch.float64) for k, row in own.items()}, m + 1)
    if c.comm.rank:
        return {}
    return {**decomposition(rows[:, :m], rows[:, m], c.p), "matrix": rows[:, :m], "global": rows[:, m]}
