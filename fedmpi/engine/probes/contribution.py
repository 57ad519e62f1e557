"""What a client gives: how much worse the average of the others' local models is.

With w_-k = sum of p_i w_i over i != k, over 1 - p_k, a client's gain is L(w_-k) - L(w_mean): the loss that its part
saves, on the global test set, or in silo mode pooled over the sites' own. Negative: the others do better without it. It
is about the plain average of local models, whatever the method's own rule makes of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.probes.cohort import Cohort, Model


def measure(c: Cohort) -> dict[str, Any]:
    """Two passes of all local models in silo mode: one for their mean, one for what is left without each."""
    p = dict(zip(c.members, c.p.tolist(), strict=True))
    w, b = torch.zeros_like(c.before.w, dtype=torch.float64), torch.zeros_like(c.before.b, dtype=torch.float64)
    for k, model in c.models():
        w, b = w + p[k] * model.w.double(), b + p[k] * model.b.double()

    def without(k: int | None, model: Model | None) -> Model:
        if k is None or model is None:
            return Model(w.to(c.dtype), b.to(c.before.b.dtype))
        rest = 1 - p[k]
        left = [(whole - p[k] * part.double()) / rest for whole, part in ((w, model.w), (b, model.b))]
        return Model(left[0].to(c.dtype), left[1].to(c.before.b.dtype))

    test = c.worker.data.global_test
    if test is not None:
        own = {k: [c.figures(without(k, model), test)["loss"], torch.nan] for k, model in c.mine.items()}
        if c.members[0] in own:
            own[c.members[0]][1] = c.figures(without(None, None), test)["loss"]
        rows = c.gather({k: torch.tensor(row, dtype=torch.float64) for k, row in own.items()}, 2)
        return {} if c.comm.rank else _told(rows[:, 0], rows[0, 1])
    seen: dict[int, list[float]] = {k: [] for k in c.mine}
    for left in (*(without(k, model) for k, model in c.models()), without(None, None)):
        for site, losses in seen.items():
            losses.append(c.figures(left, c.worker.data.test[site])["loss"])
    rows = c.gather({k: torch.tensor(row, dtype=torch.float64) for k, row in seen.items()}, len(c.members) + 1)
    if c.comm.rank:
        return {}
    n = torch.as_tensor(c.worker.data.test_sizes[list(c.members)], dtype=torch.float64)
    pooled = (n / n.sum()) @ rows.where(n[:, None] > 0, torch.zeros(()).double())
    return _told(pooled[:-1], pooled[-1])


def _told(without: Tensor, mean: Tensor) -> dict[str, Any]:
    return {"loss": mean.item(), "gain": (without - mean).tolist()}
