"""Metrics of outputs and targets, computed in float64, and their statistics over clients.

n is the number of samples and c the number of classes. An undefined metric is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

BINS = 15  # number of bins of the calibration error
NAN = float("nan")

Metrics = dict[str, float]


def nan_mean(values: Tensor | Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    x = torch.as_tensor(values, dtype=torch.float64)
    return x[~x.isnan()].mean().item()


def percent_true(hits: Tensor) -> float:
    """Return the percentage of True values in a boolean tensor; NaN if it is empty."""
    return (100 * hits.sum(dtype=torch.float64) / hits.numel()).item()  # 0 / 0 = NaN


def top_k_accuracy(f: Tensor, y: Tensor, k: int) -> float:
    """Return the percentage of samples whose class y (n,) is among the k largest logits f (n, c).

    Of equal logits, the one with the lower class number ranks higher.
    """
    return percent_true((f.argsort(dim=1, descending=True, stable=True)[:, :k] == y[:, None]).any(1))


def count_hits_by_class(guess: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of correct predictions, of targets and of predictions of each class, (c,) float64 each.

    Args:
        guess: predicted classes, of any shape.
        y: target classes, of the same shape as `guess`.
        classes: the number of classes c.
    """
    guess, y = guess.flatten(), y.flatten()
    right, targets, guessed = (
        torch.bincount(labels, minlength=classes).double() for labels in (y[guess == y], y, guess)
    )
    return right, targets, guessed


def balanced_accuracy(guess: Tensor, y: Tensor, classes: int) -> float:
    """Return the mean recall in percent over the classes that occur among the targets."""
    right, targets, _ = count_hits_by_class(guess, y, classes)
    return nan_mean(100 * right / targets)


def f1_and_iou(guess: Tensor, y: Tensor, classes: int, first: int = 0) -> tuple[float, float]:
    """Return F1 (Dice) = 2 TP / (2 TP + FP + FN) and IoU = TP / (TP + FP + FN), each averaged over classes.

    Classes below `first`, and classes that neither occur nor are predicted, are left out of the means.
    """
    right, targets, guessed = (count[first:] for count in count_hits_by_class(guess, y, classes))
    return nan_mean(2 * right / (targets + guessed)), nan_mean(right / (targets + guessed - right))


def calibration_error(f: Tensor, y: Tensor) -> float:
    """Return the expected calibration error of logits f (n, c), between 0 and 1 (Guo et al. 2017).

        sum_b |B_b| / n  |accuracy(B_b) - confidence(B_b)|
    The confidence of a sample is its largest softmax probability. Bin b of the BINS bins contains the samples whose
    confidence is in ((b - 1) / BINS, b / BINS].
    """
    confidence, guess = f.double().softmax(1).max(1)
    if not len(y) or not bool(confidence.isfinite().all()):
        return NAN
    bin_index = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gap = confidence.new_zeros(BINS).index_add_(0, bin_index, (guess == y).double() - confidence)
    return (gap.abs().sum() / len(y)).item()


def auroc(score: Tensor, positive: Tensor) -> float:
    """Return the area under the ROC curve, P(score of a positive > score of a negative) + P(equal scores) / 2.

    Args:
        score: the score of each sample, (n,).
        positive: whether each sample is positive, (n,) bool. The area is NaN if all or no samples are positive.
    """
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n or not bool(score.isfinite().all()):
        return NAN
    _, value_index, times = score.unique(return_inverse=True, return_counts=True)
    rank = times.cumsum(0).double() - (times - 1) / 2  # equal scores share their mean rank
    return (rank[value_index[positive]].sum().item() - p * (p + 1) / 2) / (p * n)


def multiclass_auroc(f: Tensor, y: Tensor) -> float:
    """Return the AUROC of logits f (n, c).

    For two classes the score is logit 1 - logit 0. For more classes it is the mean over classes of the AUROC of one
    class against the rest, with softmax probabilities as scores.
    """
    f = f.double()
    if f.shape[1] == 2:
        return auroc(f[:, 1] - f[:, 0], y == 1)
    f = f.log_softmax(1)  # ordered as the probabilities, but without ties from rounding near 1
    return nan_mean([auroc(f[:, c], y == c) for c in range(f.shape[1])])


def multilabel_auroc(f: Tensor, y: Tensor, counted: Tensor) -> float:
    """Return the AUROC averaged over labels; for each label, samples whose target is ignored are left out.

    Args:
        f: logits, (n, c).
        y: targets, (n, c) bool.
        counted: which targets are not ignored, (n, c) bool.
    """
    rows = counted.unbind(1)
    return nan_mean([auroc(f[rows[c], c].double(), y[rows[c], c]) for c in range(f.shape[1])])


def concordance_index(risk: Tensor, event: Tensor, time: Tensor) -> float:
    """Return the C-index: the fraction of comparable pairs in which the sample at higher risk has its event first.

    Pairs with equal risks count one half. Samples i and j are comparable if i has an event and either time_i < time_j,
    or the times are equal and j has no event (then j outlives i). All n^2 pairs are compared.

    Args:
        risk: the risk of each sample, (n,).
        event: whether the sample has an event, (n,).
        time: the time of the event or of censoring, (n,).
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


def client_statistics(name: str, values: Sequence[float], lower_is_better: bool = False) -> Metrics:
    """Return the mean of a metric over clients, its population standard deviation, and the mean of its worst tenth.

    The worst tenth consists of at least one client. NaN values are left out.

    Args:
        name: the name of the metric, from which the names of the statistics are formed.
        values: the metric of each client.
        lower_is_better: whether lower values are better.

    >>> client_statistics("accuracy", [90.0, 70.0])
    {'accuracy': 80.0, 'accuracy_std': 10.0, 'accuracy_worst_decile': 70.0}
    """
    x = np.sort(np.array([value for value in values if not np.isnan(value)] or [NAN]))
    worst = (x[::-1] if lower_is_better else x)[: max(len(x) // 10, 1)]
    return {name: float(x.mean()), f"{name}_std": float(x.std()), f"{name}_worst_decile": float(worst.mean())}


def weighted_client_mean(rows: Mapping[int, Metrics], weights: Mapping[int, float]) -> Metrics:
    """Return the weighted mean of each metric over clients; NaN values and clients with weight 0 are left out.

    In silo mode all metrics of the global model are such means, even AUROC and C-index, because outputs do not leave
    their site.

    Args:
        rows: the metrics of each client by name.
        weights: the weight of each client.
    """
    out = {}
    for name in next(iter(rows.values())):
        pairs = [(weights[k], row[name]) for k, row in sorted(rows.items()) if weights[k] and not np.isnan(row[name])]
        total = sum(n for n, _ in pairs)
        out[name] = sum(n * v for n, v in pairs) / total if total else NAN
    return out
