"""Metrics of outputs and targets, in float64, and their statistics over clients.

n samples, c classes; nan where a metric is not defined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of the calibration error
NAN = float("nan")

Figures = dict[str, float]


def mean(values: Tensor | Sequence[float]) -> float:
    """Of the values that are defined."""
    x = torch.as_tensor(values, dtype=torch.float64)
    return x[~x.isnan()].mean().item()  # of none nan


def percent(hits: Tensor) -> float:
    """(n,) bool -> share in percent."""
    return (100 * hits.sum(dtype=torch.float64) / hits.numel()).item()  # none: 0 / 0 = nan


def top(f: Tensor, y: Tensor, k: int) -> float:
    """Percent of samples whose class is among the k largest logits; of equal ones the lower class comes first."""
    return percent((f.argsort(dim=1, descending=True, stable=True)[:, :k] == y[:, None]).any(1))


def hits_by_class(guess: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """How often a class is guessed rightly, is the target, is guessed.   any shape, twice -> (c,) float64, each"""
    guess, y = guess.flatten(), y.flatten()
    right, there, guessed = (torch.bincount(labels, minlength=classes).double() for labels in (y[guess == y], y, guess))
    return right, there, guessed


def balanced_accuracy(guess: Tensor, y: Tensor, classes: int) -> float:
    """Mean recall, in percent, over the classes that occur."""
    right, there, _ = hits_by_class(guess, y, classes)
    return mean(100 * right / there)


def overlap(guess: Tensor, y: Tensor, classes: int, first: int = 0) -> tuple[float, float]:
    """F1 (Dice) 2 TP / (2 TP + FP + FN) and IoU TP / (TP + FP + FN), each a mean over the classes >= first that are
    guessed or the target."""
    right, there, guessed = (each[first:] for each in hits_by_class(guess, y, classes))
    return mean(2 * right / (there + guessed)), mean(right / (there + guessed - right))


def calibration_error(f: Tensor, y: Tensor) -> float:
    """Expected calibration error, 0 to 1 (Guo et al. 2017): sum_b |B_b| / n  |accuracy(B_b) - confidence(B_b)|, with
    samples in BINS bins ((b - 1) / BINS, b / BINS] by their confidence, the largest softmax probability."""
    sure, guess = f.double().softmax(1).max(1)
    if not len(y) or not bool(sure.isfinite().all()):
        return NAN
    place = (sure * BINS).ceil().long().clamp(1, BINS) - 1
    gap = sure.new_zeros(BINS).index_add_(0, place, (guess == y).double() - sure)
    return (gap.abs().sum() / len(y)).item()


def auroc(score: Tensor, positive: Tensor) -> float:
    """P(score of a positive > that of a negative) + P(equal) / 2.   (n,), (n,) bool; nan without both"""
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n or not bool(score.isfinite().all()):
        return NAN
    _, place, times = score.unique(return_inverse=True, return_counts=True)
    rank = times.cumsum(0).double() - (times - 1) / 2  # equal scores share their mean rank
    return (rank[place[positive]].sum().item() - p * (p + 1) / 2) / (p * n)


def class_auroc(f: Tensor, y: Tensor) -> float:
    """Of two classes that of logit 1 - logit 0; of more the mean over classes of one against the rest, by softmax."""
    f = f.double()
    if f.shape[1] == 2:
        return auroc(f[:, 1] - f[:, 0], y == 1)
    f = f.log_softmax(1)  # it ranks as probabilities do, and near 1 parts what they do not
    return mean([auroc(f[:, c], y == c) for c in range(f.shape[1])])


def label_auroc(f: Tensor, y: Tensor, counted: Tensor) -> float:
    """Mean over labels, each of the samples that count there.   (n, c), (n, c) bool, twice"""
    rows = counted.unbind(1)
    return mean([auroc(f[rows[c], c].double(), y[rows[c], c]) for c in range(f.shape[1])])


def concordance(risk: Tensor, event: Tensor, time: Tensor) -> float:
    """C-index: of the pairs that can be compared the share in which who has the higher risk has the event first, equal
    risks counting one half. Of two samples (i, j) they can be, if i has an event and either time_i < time_j, or the
    times are equal and j has none (then j outlives i).   (n,) each; takes n^2 comparisons
    """
    if not bool(risk.isfinite().all()):
        return NAN
    event = event > 0
    pairs = torch.zeros((), dtype=torch.float64, device=risk.device)
    right = torch.zeros_like(pairs)
    for rows in event.nonzero().flatten().split(1024):
        later = (time > time[rows, None]) | ((time == time[rows, None]) & ~event)
        pairs += later.sum()
        right += (later & (risk < risk[rows, None])).sum() + (later & (risk == risk[rows, None])).sum() / 2
    return (right / pairs).item()


def spread(name: str, values: Sequence[float], falling: bool = False) -> Figures:
    """Mean, population standard deviation and mean of the worst tenth (at least one) of the clients; nan left out.
    falling: less is better.

    >>> spread("accuracy", [90.0, 70.0])
    {'accuracy': 80.0, 'accuracy_std': 10.0, 'accuracy_worst_decile': 70.0}
    """
    x = np.sort(np.array([value for value in values if not np.isnan(value)] or [NAN]))
    worst = (x[::-1] if falling else x)[: max(len(x) // 10, 1)]
    return {name: float(x.mean()), f"{name}_std": float(x.std()), f"{name}_worst_decile": float(worst.mean())}


def pooled(rows: Mapping[int, Figures], weights: Mapping[int, float]) -> Figures:
    """Weighted mean of per-client figures, without clients that lack the figure or weigh nothing. That is what silos
    have of every figure, of one of rankings (AUROC, C-index) too: outputs stay where their samples are."""
    out = {}
    for name in next(iter(rows.values())):
        pairs = [(weights[k], row[name]) for k, row in sorted(rows.items()) if weights[k] and not np.isnan(row[name])]
        total = sum(n for n, _ in pairs)
        out[name] = sum(n * v for n, v in pairs) / total if total else NAN
    return out
