"""What features and head make of common samples (FedUV, whose terms are about both), and how alike models see them.

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

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.data.batches import Shard, batches
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.probes.cohort import Cohort, Model

SAMPLES, VALUES, CLASSES = 512, 32, 30  # rows that are used; singular values and classes that are recorded
ONE = ("rank", "energy", "uniformity", "deviation")  # numbers; the others are lists
LOCAL = (*ONE, "spectrum", "classifier")
ROWS = 32  # of the kernels K (n, n) that are gathered at once: rank 0 holds m of them


def rows(c: Cohort) -> Shard:
    """At most SAMPLES of the global test set, the same for every model, rank and round."""
    test = c.trainer.data.global_test
    assert test is not None  # checked by runtime/compatibility.py
    n = min(len(test), SAMPLES)
    return Shard(test.x, test.y, test.index[torch.arange(n) * len(test) // max(n, 1)])


def outputs(c: Cohort, model: Model) -> tuple[Tensor, Tensor]:
    """z (n, z) and outputs f (n, C) of `rows`, float64, in evaluation mode."""
    trainer, parts = c.trainer, []
    trainer.model.load(model.w, model.b)
    trainer.model.module.eval()
    with torch.inference_mode(), trainer.precision() if trainer.bf16 else nullcontext():
        for x, _ in batches(rows(c), c.batch, None):
            z, f = trainer.net.forward(x)
            assert z is not None  # runtime/compatibility.py
            parts.append((z.double().cpu(), f.double().cpu()))
    z, f = (torch.cat(side) for side in zip(*parts, strict=True))
    return z, f


def spectrum(z: Tensor) -> Tensor:
    """(min(n, z),) singular values of the centred features over sqrt n, the largest first.

    >>> spectrum(torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, 1.0], [-3.0, 1.0]])).round(decimals=4)
    tensor([3., 0.])
    """
    return torch.linalg.svdvals((z - z.mean(0)) / len(z) ** 0.5)


def rank(values: Tensor) -> Tensor:
    """Effective rank () of singular values: k for k equal ones; nan where all are 0."""
    return (torch.special.entr(values / values.sum())).sum().exp()


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
    """
    values = spectrum(z)
    result = {"rank": rank(values), "energy": energy(z), "uniformity": uniformity(z), "spectrum": values[:VALUES]}
    if head is not None:
        result["classifier"] = torch.linalg.svdvals(head.double().cpu())[:VALUES]
    if classes:
        P = f.softmax(1)
        result["deviation"] = P.std(0).mean()
        result |= {"predicted": P.mean(0)} if classes <= CLASSES else {}
    return {name: value.reshape(-1) for name, value in result.items()}


def measure_features(c: Cohort) -> dict[str, Any]:
    """The global model is the task of the rank with the first client."""
    trainer, first = c.trainer, c.members[0]
    weight = getattr(trainer.net.head, "weight", None)
    weights = weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None
    classes = _classes(trainer)
    sizes = _sizes(len(rows(c)), trainer.net.feature_dim or 0, weights, classes)
    width = sum(sizes.values())
    nothing = torch.full((width,), torch.nan, dtype=torch.float64)

    def row(model: Model) -> Tensor:
        z, f = outputs(c, model)
        if not bool(z.isfinite().all() & f.isfinite().all()):
            return nothing  # a client has diverged: decompositions would raise
        values = output_statistics(z, f, weights, classes)  # weights: views of the model that outputs() has loaded
        return torch.cat([values[name] for name in sizes])

    own = {k: row(model) for k, model in c.mine.items()}
    after = row(c.after) if first in own else nothing
    both = c.gather({k: torch.cat([mine, after if k == first else nothing]) for k, mine in own.items()}, 2 * width)
    if c.comm.rank:
        return {}
    lengths = tuple(sizes.values())
    local = dict(zip(sizes, both[:, :width].split(lengths, 1), strict=True))
    of_global = dict(zip(sizes, both[0, width:].split(lengths), strict=True))
    result: dict[str, Any] = {"samples": len(rows(c))}
    for name in (name for name in sizes if name in LOCAL):
        for key, value in ((name, of_global[name]), (f"{name}_local", local[name].mean(0))):
            result[key] = value.item() if name in ONE else value.tolist()
    if "predicted" in sizes:
        result["predicted"] = local["predicted"].tolist()
    return result


def _classes(trainer: ClientTrainer) -> int:
    """C where outputs are logits of classes, else 0."""
    data = trainer.data
    labels = data.target_dtype == torch.int64 and data.target_shape == () and trainer.net.outputs == data.classes
    return data.classes if labels and getattr(trainer.task, "classification", False) else 0


def _sizes(n: int, dim: int, weights: Tensor | None, classes: int) -> dict[str, int]:
    """Of what `output_statistics` gives, known on every rank."""
    sizes = {**dict.fromkeys(ONE[:3], 1), "spectrum": min(n, dim, VALUES)}
    if weights is not None:
        sizes["classifier"] = min(*weights.shape, VALUES)
    if classes:
        sizes["deviation"] = 1
    if 0 < classes <= CLASSES:
        sizes["predicted"] = classes
    return sizes


def unit(z: Tensor) -> Tensor:
    """Centred features, scaled such that |Z Z'|_F = 1.   (n, z) -> (n, z) float64"""
    z = z.double() - z.double().mean(0)
    return z / (z.T @ z).norm().sqrt()


def cka(z: Tensor, other: Tensor) -> Tensor:
    """CKA () of two models' features (n, z), (n, z').

    >>> z = torch.eye(3)[:, :2]
    >>> round(cka(z, 2 * z.flip(1)).item(), 6), round(cka(z, z[:, :1]).item(), 6)
    (1.0, 0.790569)
    """
    return (unit(other).T @ unit(z)).square().sum()


def measure_similarity(c: Cohort) -> dict[str, Any]:
    """How alike what models make of the same samples is: linear CKA (Kornblith, Norouzi, Lee, Hinton, ICML 2019).

    Of features Z_i (n, z_i), what the head is given, less their mean over the n samples:
        CKA(i, k) = |Z_k' Z_i|_F^2 / (|Z_i' Z_i|_F |Z_k' Z_k|_F)      = <K_i, K_k>,  K_i = Z_i Z_i' / |Z_i Z_i'|_F
    1 for features that differ by a rotation and a scale, nan where a model's do not vary. On the samples of `rows`.
    The smaller n against z, the nearer even unlike ones are to 1: to compare with others of the same n and z.

    Of each local model with the global ones, where it was trained; between all of them at rank 0, which is sent some
    rows of their kernels at a time.
    """

    def of(model: Model) -> Tensor:
        return unit(outputs(c, model)[0])

    mine = {k: of(model) for k, model in c.mine.items()}
    both = [of(model) for model in (c.before, c.after)] if mine else []
    with_global = c.gather({k: torch.stack([cka(z, other) for other in both]) for k, z in mine.items()}, 2)
    m, n = len(c.members), len(rows(c))
    between = torch.zeros(m, m, dtype=torch.float64)
    for start in range(0, n, ROWS):
        stop = min(start + ROWS, n)
        kernels = c.gather({k: (z[start:stop] @ z.T).flatten() for k, z in mine.items()}, (stop - start) * n)
        if not c.comm.rank:
            between += kernels @ kernels.T
    if c.comm.rank:
        return {}
    i, k = torch.triu_indices(m, m, offset=1)
    pairs, (before, after) = between[i, k], with_global.T
    return {
        "samples": n,
        "pairs_mean": pairs.nanmean().item() if m > 1 else None,
        "before": before.tolist(),
        "before_mean": before.nanmean().item(),
        "after": after.tolist(),
        "after_mean": after.nanmean().item(),
        "matrix": between.tolist(),
    }
