"""What features and head make of common samples (FedUV, whose terms are about both).

Of SAMPLES rows of the global test set, evenly spaced: features z, what the head is given, and probabilities P; for the
global model after the round, and as the mean over the local models (..._local).
    spectrum     singular values of z - mean z, over sqrt n: standard deviations along the principal directions
    rank         exp(- sum_j q_j log q_j), q the singular values over their sum (Roy and Vetterli 2007)
    energy       mean over pairs of exp(-2 |u_i - u_j|^2), u = z / |z|: 1 where all features have one direction
                 (Wang and Isola 2020 take its logarithm)
    uniformity   FedUV's U: the same of z itself, in units of the median distance
    classifier   singular values of the head's weights, at which FedUV's analysis looks
    deviation    mean over c of FedUV's s_c, standard deviation of P_c: about sqrt(C - 1) / C where each sample is given
                 its class for certain, and classes are even
Beside them `predicted`, mean P by local model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.data.batches import Shard, batches
from fedmpi.engine.probes.cohort import Cohort, Model, Probe

SAMPLES, VALUES, CLASSES = 512, 32, 30  # rows that are used; singular values and classes that are recorded
LISTS = ("spectrum", "classifier", "predicted")  # the others are numbers


def samples(c: Cohort) -> Shard:
    """At most SAMPLES of the global test set, the same for every model, rank and round."""
    test = c.trainer.data.global_test
    assert test is not None  # checked by runtime/compatibility.py
    n = min(len(test), SAMPLES)
    return Shard(test.x, test.y, test.index[torch.arange(n) * len(test) // max(n, 1)])


def outputs(c: Cohort, model: Model) -> tuple[Tensor, Tensor]:
    """z (n, z) and outputs f (n, C) of the samples, float64, in evaluation mode; the model is loaded."""
    trainer, parts = c.trainer, []
    trainer.model.load(*model)
    trainer.model.module.eval()
    with torch.inference_mode(), trainer.precision() if trainer.bf16 else nullcontext():
        for x, _ in batches(samples(c), c.batch, None):
            z, f = trainer.net.forward(x)
            assert z is not None  # runtime/compatibility.py
            parts.append((z.double().cpu(), f.double().cpu()))
    z, f = (torch.cat(side) for side in zip(*parts, strict=True))
    return z, f


def energy(z: Tensor) -> Tensor:
    """() of features (n, z); one of zeros has no direction, and stays 0."""
    return (-2 * functional.pdist(functional.normalize(z)).square()).exp().mean()


def uniformity(z: Tensor) -> Tensor:
    """U () of features (n, z): mean exp(-d / sigma), d squared distances, sigma the median of those above 0."""
    d = functional.pdist(z).square()
    distances = d[d > 0]
    return (-d / distances.median()).exp().mean() if len(distances) else d.new_ones(())


def output_statistics(z: Tensor, f: Tensor, head: Tensor | None, classes: int) -> dict[str, Tensor]:
    """Everything, (1,) or longer, of features (n, z), outputs (n, C) and the head's weights (C, z).

    classes: C, and 0 where outputs are no logits of classes; `predicted` is recorded of at most CLASSES.

    >>> z = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, 1.0], [-3.0, 1.0]])
    >>> output_statistics(z, z, None, 0)["spectrum"].round(decimals=4)
    tensor([3., 0.])
    """
    values = torch.linalg.svdvals((z - z.mean(0)) / len(z) ** 0.5)
    rank = torch.special.entr(values / values.sum()).sum().exp()  # k for k equal ones; nan where all are 0
    result = {"rank": rank, "energy": energy(z), "uniformity": uniformity(z), "spectrum": values[:VALUES]}
    if head is not None:
        result["classifier"] = torch.linalg.svdvals(head.double().cpu())[:VALUES]
    if classes:
        P = f.softmax(1)
        result["deviation"] = P.std(0).mean()
        result |= {"predicted": P.mean(0)} if classes <= CLASSES else {}
    return {name: value.reshape(-1) for name, value in result.items()}


def statistics_of(c: Cohort, z: Tensor, f: Tensor) -> dict[str, Tensor]:
    """`output_statistics` with the head's weights that are loaded."""
    trainer, weight = c.trainer, getattr(c.trainer.net.head, "weight", None)
    head = weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None
    data, classification = trainer.data, getattr(trainer.task, "classification", False)
    labels = data.target_dtype == torch.int64 and data.target_shape == () and trainer.net.outputs == data.classes
    return output_statistics(z, f, head, data.classes if labels and classification else 0)


def sizes(c: Cohort) -> dict[str, int]:
    """How long each statistic is, on every rank."""
    n, net = len(samples(c)), c.trainer.net
    of_zeros = statistics_of(c, torch.zeros(n, net.feature_dim or 0), torch.zeros(n, net.outputs))
    return {name: len(value) for name, value in of_zeros.items()}


def rows(c: Cohort) -> tuple[int, Mapping[int, Tensor]]:
    width = sum(sizes(c).values())

    def row(model: Model) -> Tensor:
        z, f = outputs(c, model)
        if not bool(z.isfinite().all() & f.isfinite().all()):
            return torch.full((width,), torch.nan)  # a client has diverged: decompositions would raise
        return torch.cat([*statistics_of(c, z, f).values()])

    after = row(c.after) if c.mine else torch.empty(0)
    return 2 * width, {k: torch.cat([row(model), after]) for k, model in c.mine.items()}


def summary(c: Cohort, rows: Tensor) -> dict[str, Any]:
    lengths = sizes(c)
    local, after = (half.split([*lengths.values()], 1) for half in rows.split(rows.shape[1] // 2, 1))
    result: dict[str, Any] = {"samples": len(samples(c))}
    for name, mine, of_global in zip(lengths, local, after, strict=True):
        if name == "predicted":
            result[name] = mine.tolist()
            continue
        for key, value in ((name, of_global[0]), (f"{name}_local", mine.mean(0))):
            result[key] = value.tolist() if name in LISTS else value.item()
    return result


FEATURES = Probe(rows, summary)
