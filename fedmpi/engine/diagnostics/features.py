"""Statistics of features and head on common samples, which FedUV's terms regularise.

The samples are SAMPLES rows of the global test set, evenly spaced. z are their features, the inputs of the head, and P
the predicted probabilities. Each number is computed for the global model after the round, and as the mean over the
local models (..._local). It is nan if the task has no classes or the head is not one linear layer.
    rank         exp(- sum_j q_j log q_j), q the singular values of z - mean z over their sum (Roy and Vetterli 2007)
    uniformity   FedUV's U: mean over pairs of exp(-d / sigma), d squared distances, sigma the median of those above 0
    classifier   mean singular value of the head's weights, as in FedUV's analysis
    deviation    mean over c of FedUV's s_c, standard deviation of P_c: about sqrt(C - 1) / C if predictions are certain
                 and correct, and classes have equal size
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pdist

from fedmpi.data.batches import Shard, batches
from fedmpi.engine.diagnostics.cohort import Cohort, Model, Probe

SAMPLES = 512
NAMES = ("rank", "uniformity", "classifier", "deviation")


def samples(c: Cohort) -> Shard:
    """Return at most SAMPLES rows of the global test set, the same for every model, rank and round."""
    test = c.trainer.data.global_test
    assert test is not None  # checked by runtime/compatibility.py
    n = min(len(test), SAMPLES)
    return Shard(test.x, test.y, test.index[torch.arange(n) * len(test) // max(n, 1)])


def outputs(c: Cohort, model: Model) -> tuple[Tensor, Tensor]:
    """Load a model; return features z (n, z) and outputs f (n, C) of the samples, float64, in evaluation mode."""
    trainer, parts = c.trainer, []
    trainer.model.load(*model)
    trainer.model.module.eval()
    with torch.inference_mode(), trainer.precision() if trainer.bf16 else nullcontext():
        for x, _ in batches(samples(c), c.batch, None):
            z, f = trainer.net.forward(x)
            assert z is not None  # checked by runtime/compatibility.py
            parts.append((z.double().cpu(), f.double().cpu()))
    z, f = (torch.cat(side) for side in zip(*parts, strict=True))
    return z, f


def statistics(z: Tensor, f: Tensor, head: Tensor | None, classes: bool) -> Tensor:
    """Return the statistics NAMES (4,) of features z (n, z), outputs f (n, C) and the head's weights (C, z).

    >>> z = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, 1.0], [-3.0, 1.0]])
    >>> statistics(z, z, torch.eye(2), classes=False)[[0, 2, 3]]
    tensor([1., 1., nan])
    """
    nothing = z.new_full((), torch.nan)
    if not bool(z.isfinite().all() & f.isfinite().all()):
        return nothing.expand(len(NAMES))  # a client has diverged; svdvals would raise an error
    values, d = torch.linalg.svdvals(z - z.mean(0)), pdist(z).square()
    rank = torch.special.entr(values / values.sum()).sum().exp()  # k for k equal singular values; nan if all are 0
    uniformity = (-d / d[d > 0].median()).exp().mean() if d.any() else d.new_ones(())
    classifier = nothing if head is None else torch.linalg.svdvals(head.to(z)).mean()
    deviation = f.softmax(1).std(0).mean() if classes else nothing
    return torch.stack([rank, uniformity, classifier, deviation])


def rows(c: Cohort) -> tuple[int, Mapping[int, Tensor]]:
    """Return the width and a row for each client of this rank: statistics of its local and of the global model."""
    trainer, data, weight = c.trainer, c.trainer.data, getattr(c.trainer.net.head, "weight", None)
    head = weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None  # of the loaded model
    labels = data.target_dtype == torch.int64 and data.target_shape == () and trainer.net.num_outputs == data.classes
    classes = labels and getattr(trainer.task, "classification", False)
    after = statistics(*outputs(c, c.after), head, classes) if c.mine else torch.empty(0)
    own = {k: statistics(*outputs(c, model), head, classes) for k, model in c.mine.items()}
    return 2 * len(NAMES), {k: torch.cat([row, after]) for k, row in own.items()}


def summary(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the statistics of the global model, and their means over the local models (..._local)."""
    local, of_global = rows[:, : len(NAMES)].mean(0).tolist(), rows[0, len(NAMES) :].tolist()
    means = {f"{name}_local": value for name, value in zip(NAMES, local, strict=True)}
    return {"samples": len(samples(c)), **dict(zip(NAMES, of_global, strict=True)), **means}


FEATURES = Probe(rows, summary)
