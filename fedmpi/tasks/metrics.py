"""Metrics computed from outputs and targets in float64, and their statistics over clients.

n is the number of samples and c the number of classes. A metric that is not defined is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

BINS = 15  # number of bins of the calibration error
NAN = float("nan")

Figures = dict[str, float]


def mean(values: Tensor | Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    x = torch.as_tensor(values, dtype=torch.float64)
    return x[~x.isnan()].mean().item()  # nan if no value is left


def percent(hits: Tensor) -> float:
    """Return the share of True values in percent.   (n,) bool"""
    return (100 * hits.sum(dtype=torch.float64) / hits.numel()).item()  # 0 / 0 = nan without samples


def top(f: Tensor, y: Tensor, k: int) -> float:
    """Return the percentage of samples whose class is among the k largest logits; ties go to lower classes."""
    return percent((f.argsort(dim=1, descending=True, stable=True)[:, :k] == y[:, None]).any(1))


def hits_by_class(guess: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count for each class its correct predictions, its targets and its predictions.   -> (c,) float64 each

    Args:
        guess: predicted classes, of any shape.
        y: target classes, of the same shape.
    """
    guess, y = guess.flatten(), y.flatten()
    right, there, guessed = (torch.bincount(labels, minlength=classes).double() for labels in (y[guess == y], y, guess))
    return right, there, guessed


def balanced_accuracy(guess: Tensor, y: Tensor, classes: int) -> float:
    """Return the mean recall, in percent, over the classes that occur."""
    right, there, _ = hits_by_class(guess, y, classes)
    return mean(100 * right / there)


def overlap(guess: Tensor, y: Tensor, classes: int, first: int = 0) -> tuple[float, float]:
    """Return F1 (Dice) 2 TP / (2 TP + FP + FN) and IoU TP / (TP + FP + FN), each a mean over classes.

    The mean includes the classes >= `first` that occur or are predicted.
    """
    right, there, guessed = (each[first:] for each in hits_by_class(guess, y, classes))
    return mean(2 * right / (there + guessed)), mean(right / (there + guessed - right))


def calibration_error(f: Tensor, y: Tensor) -> float:
    """Return the expected calibration error of logits f (n, c), 0 to 1 (Guo et al. 2017).

        sum_b |B_b| / n  |accuracy(B_b) - confidence(B_b)|
    Bin b of the BINS bins has the samples whose confidence, the largest softmax probability, is in
    ((b - 1) / BINS, b / BINS].
    """
    sure, guess = f.double().softmax(1).max(1)
    if not len(y) or not bool(sure.isfinite().all()):
        return NAN
    place = (sure * BINS).ceil().long().clamp(1, BINS) - 1
    gap = sure.new_zeros(BINS).index_add_(0, place, (guess == y).double() - sure)
    return (gap.abs().sum() / len(y)).item()


def auroc(score: Tensor, positive: Tensor) -> float:
    """Return the area under the ROC curve:  P(score of a positive > that of a negative) + P(equal) / 2.

    Args:
        score: (n,).
        positive: (n,) bool; NaN is returned if all or none of the samples are positive.
    """
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n or not bool(score.isfinite().all()):
        return NAN
    _, place, times = score.unique(return_inverse=True, return_counts=True)
    rank = times.cumsum(0).double() - (times - 1) / 2  # equal scores share their mean rank
    return (rank[place[positive]].sum().item() - p * (p + 1) / 2) / (p * n)


def class_auroc(f: Tensor, y: Tensor) -> float:
    """Return the AUROC of logits f (n, c): for two classes that of the score logit 1 - logit 0.

    For more classes it is the mean over classes of one against the rest, with softmax probabilities as scores.
    """
    f = f.double()
    if f.shape[1] == 2:
        return auroc(f[:, 1] - f[:, 0], y == 1)
    f = f.log_softmax(1)  # has the order of the probabilities, which near 1 are equal after rounding
    return mean([auroc(f[:, c], y == c) for c in range(f.shape[1])])


def label_auroc(f: Tensor, y: Tensor, counted: Tensor) -> float:
    """Return the mean over labels of the AUROC, each computed from the samples whose target counts.

    Args:
        f: logits, (n, c).
        y: targets, (n, c) bool.
        counted: which targets count, (n, c) bool.
    """
    rows = counted.unbind(1)
    return mean([auroc(f[rows[c], c].double(), y[rows[c], c]) for c in range(f.shape[1])])


def concordance(risk: Tensor, event: Tensor, time: Tensor) -> float:
    """Return the C-index: the share of comparable pairs in which the sample with the higher risk has the event first.

    Equal risks count one half. Samples (i, j) are comparable if i has an event and either time_i < time_j, or the times
    are equal and j has no event (then j outlives i). All arguments are (n,); n^2 comparisons are made.
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


def spread(name: str, values: Sequence[float], lower_is_better: bool = False) -> Figures:
    """Return the mean, the population standard deviation and the mean of the worst tenth of values over clients.

    The worst tenth has at least one client; NaN values are left out. lower_is_better: smaller values are better.

    >>> spread("accuracy", [90.0, 70.0])
    {'accuracy': 80.0, 'accuracy_std': 10.0, 'accuracy_worst_decile': 70.0}
    """
    x = np.sort(np.array([value for value in values if not np.isnan(value)] or [NAN]))
    worst = (x[::-1] if lower_is_better else x)[: max(len(x) // 10, 1)]
    return {name: float(x.mean()), f"{name}_std": float(x.std()), f"{name}_worst_decile": float(worst.mean())}


def pooled(rows: Mapping[int, Figures], weights: Mapping[int, float]) -> Figures:
    """Return the weighted mean over clients of each metric, without clients whose metric is NaN or whose weight is 0.

    With silos all metrics of the global model are such means, also AUROC and C-index, because outputs do not leave
    their site.
    """
    out = {}
    for name in next(iter(rows.values())):
        pairs = [(weights[k], row[name]) for k, row in sorted(rows.items()) if weights[k] and not np.isnan(row[name])]
        total = sum(n for n, _ in pairs)
        out[name] = sum(n * v for n, v in pairs) / total if total else NAN
    return out
