"""Metrics of outputs and targets, in float64, and their statistics over clients.

n samples, c classes; nan where a metric is not defined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of the calibration error
NAN = float("nan")

Figures = dict[str, float]


def percent(hits: Tensor) -> float:
    """(n,) bool -> share in percent."""
    return (100 * hits.sum(dtype=torch.float64) / hits.numel()).item()  # none: 0 / 0 = nan


def top(f: Tensor, y: Tensor, k: int) -> float:
    """Percent of samples whose class is among the k largest logits; of equal ones the lower class comes first."""
    f = f.nan_to_num(nan=math.inf)  # as argmax has it
    own = f.gather(1, y[:, None])
    lower = torch.arange(f.shape[1], device=f.device) < y[:, None]
    return percent(((f > own) | ((f == own) & lower)).sum(1) < k)


def hits_by_class(guess: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """How often a class is guessed rightly, is the target, is guessed.   any shape, twice -> (c,) float64, each"""
    guess, y = guess.flatten(), y.flatten()
    each = (torch.bincount(labels, minlength=classes).double() for labels in (y[guess == y], y, guess))
    right, there, guessed = each
    return right, there, guessed


def balanced_accuracy(guess: Tensor, y: Tensor, classes: int) -> float:
    """Mean recall, in percent, over the classes that occur."""
    right, there, _ = hits_by_class(guess, y, classes)
    return (100 * _mean((right / there)[there > 0])).item()


def overlap(guess: Tensor, y: Tensor, classes: int, first: int = 0) -> tuple[float, float]:
    """F1 (Dice) 2 TP / (2 TP + FP + FN) and IoU TP / (TP + FP + FN), each a mean over the classes >= first that are
    guessed or the target."""
    right, there, guessed = (each[first:] for each in hits_by_class(guess, y, classes))
    occurs = there + guessed > 0
    dice, iou = 2 * right / (there + guessed), right / (there + guessed - right)
    return _mean(dice[occurs]).item(), _mean(iou[occurs]).item()


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
    f = log_softmax(f)
    return mean(auroc(f[:, c], y == c) for c in range(f.shape[1]))


def log_softmax(f: Tensor) -> Tensor:
    """It ranks as probabilities do, and near 1 parts what they do not. The sum is in ascending order, its largest term
    1: rows of equal logits in another order, or moved by a constant, tie to the bit.   (n, c)"""
    f = f - f.amax(1, keepdim=True)
    return f - f.sort(1).values[:, :-1].exp().sum(1, keepdim=True).log1p()


def label_auroc(f: Tensor, y: Tensor, counted: Tensor) -> float:
    """Mean over labels, each of the samples that count there.   (n, c), (n, c) bool, twice"""
    rows = counted.unbind(1)
    return mean(auroc(f[rows[c], c].double(), y[rows[c], c]) for c in range(f.shape[1]))


def mean(values: Iterable[float]) -> float:
    """Of those that are defined."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else NAN


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
    defined = np.sort(np.array([v for v in values if not np.isnan(v)], dtype=np.float64))
    if falling:
        defined = defined[::-1]  # worst first
    if not len(defined):
        return dict.fromkeys((name, f"{name}_std", f"{name}_worst_decile"), float("nan"))
    worst = defined[: max(len(defined) // 10, 1)]
    return {
        name: float(defined.mean()),
        f"{name}_std": float(defined.std()),
        f"{name}_worst_decile": float(worst.mean()),
    }


def pooled(rows: Mapping[int, Figures], weights: Mapping[int, float]) -> Figures:
    """Weighted mean of per-client figures, without clients that lack the figure or weigh nothing. That is what silos
    have of every figure, of one of rankings (AUROC, C-index) too: outputs stay where their samples are."""
    out = {}
    for name in next(iter(rows.values())):
        pairs = [(weights[k], row[name]) for k, row in sorted(rows.items()) if weights[k] and not np.isnan(row[name])]
        total = sum(n for n, _ in pairs)
        out[name] = sum(n * v for n, v in pairs) / total if total else float("nan")
    return out


def _mean(x: Tensor) -> Tensor:
    return x.mean() if len(x) else x.new_tensor(NAN)
