"""Probe `features`: statistics of the features and the head, related to the regularisers of FedUV.

The statistics are computed on up to MAX_SAMPLES evenly spaced rows of the global test set. z are the features of these
rows, i.e. the inputs of the head, and P the predicted probabilities. Each statistic NAME is computed for the global
model after the round, and for each local model; NAME_local is the mean over the local models. `classifier` is nan if
the head is not a single linear layer, `deviation` if the task has no classes.
    rank         exp(- sum_j q_j log q_j), q: singular values of z - mean z, divided by their sum (Roy, Vetterli 2007)
    uniformity   FedUV's U: mean over pairs of exp(-d / sigma), d: squared distances, sigma: median of the non-zero d
    classifier   mean singular value of the head's weights, as in FedUV's analysis
    deviation    FedUV's s_c, the standard deviation of P_c over samples, averaged over the C classes. It is about
                 sqrt(C - 1) / C if predictions are certain and correct, and classes have equal size
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

MAX_SAMPLES = 512
STATISTICS = ("rank", "uniformity", "classifier", "deviation")


def select_global_test_samples(c: Cohort) -> Shard:
    """Return at most MAX_SAMPLES samples of the global test set, the same for every model, rank and round."""
    test = c.trainer.data.global_test
    assert test is not None  # checked by runtime/compatibility.py
    n = min(len(test), MAX_SAMPLES)
    return Shard(test.x, test.y, test.index[torch.arange(n) * len(test) // max(n, 1)])


def compute_outputs(c: Cohort, model: Model) -> tuple[Tensor, Tensor]:
    """Return features and outputs (n, C) of a model for the n selected test samples, in evaluation mode, as float64."""
    trainer, parts = c.trainer, []
    trainer.model.load(*model)
    trainer.model.module.eval()
    with torch.inference_mode(), trainer.autocast_context() if trainer.bf16 else nullcontext():
        for x, _ in batches(select_global_test_samples(c), c.batch_size, None):
            z, f = trainer.net.forward(x)
            assert z is not None  # checked by runtime/compatibility.py
            parts.append((z.double().cpu(), f.double().cpu()))
    z, f = (torch.cat(side) for side in zip(*parts, strict=True))
    return z, f


def feature_statistics(z: Tensor, f: Tensor, head: Tensor | None, classes: bool) -> Tensor:
    """Return the four statistics named in STATISTICS.

    Args:
        z: the features of n samples, one row per sample.
        f: (n, C), the outputs for these samples.
        head: the weights of the head; None if it is not one linear layer.
        classes: whether the task has classes.

    >>> z = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, 1.0], [-3.0, 1.0]])
    >>> feature_statistics(z, z, torch.eye(2), classes=False)[[0, 2, 3]]
    tensor([1., 1., nan])
    """
    missing = z.new_full((), torch.nan)
    if not bool(z.isfinite().all() & f.isfinite().all()):
        return missing.expand(len(STATISTICS))  # a client has diverged; svdvals would raise an error
    values, d = torch.linalg.svdvals(z - z.mean(0)), pdist(z).square()
    rank = torch.special.entr(values / values.sum()).sum().exp()  # k for k equal singular values; nan if all are 0
    uniformity = (-d / d[d > 0].median()).exp().mean() if d.any() else d.new_ones(())
    classifier = missing if head is None else torch.linalg.svdvals(head.to(z)).mean()
    deviation = f.softmax(1).std(0).mean() if classes else missing
    return torch.stack([rank, uniformity, classifier, deviation])


def compute_feature_rows(c: Cohort) -> tuple[int, Mapping[int, Tensor]]:
    """Return, for each client of this rank, a row with the statistics of its local model and of the global model."""
    trainer, data, weight = c.trainer, c.trainer.data, getattr(c.trainer.net.head, "weight", None)
    head = weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None  # of the loaded model
    labels = data.target_dtype == torch.int64 and data.target_shape == () and trainer.net.num_outputs == data.classes
    classes = labels and getattr(trainer.task, "classification", False)
    after = feature_statistics(*compute_outputs(c, c.after), head, classes) if c.local_models else torch.empty(0)
    own = {k: feature_statistics(*compute_outputs(c, model), head, classes) for k, model in c.local_models.items()}
    return 2 * len(STATISTICS), {k: torch.cat([row, after]) for k, row in own.items()}


def summarize(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the statistics of the global model, and the mean of each statistic over the local models (NAME_local).

    Args:
        c: the cohort of the measured round.
        rows: one row for each local model: its statistics, followed by those of the global model.
    """
    local, of_global = rows[:, : len(STATISTICS)].mean(0).tolist(), rows[0, len(STATISTICS) :].tolist()
    means = {f"{name}_local": value for name, value in zip(STATISTICS, local, strict=True)}
    return {"samples": len(select_global_test_samples(c)), **dict(zip(STATISTICS, of_global, strict=True)), **means}


FEATURES_PROBE = Probe(compute_feature_rows, summarize)
