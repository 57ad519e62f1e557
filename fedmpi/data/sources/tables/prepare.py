"""Gaps filled, words made columns of 0 and 1, numbers standardised: by each site's own training rows, or by all.

`groups` (n,) says whose each row is, `train` (n,) whether it is a training row. Only training rows are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def _groups(groups: np.ndarray, train: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(all rows, training rows) of each group."""
    for group in np.unique(groups):
        mine = groups == group
        yield mine, mine & train


def filled(x: np.ndarray, groups: np.ndarray, train: np.ndarray) -> np.ndarray:
    """x (n,) with the median of the group's training rows in the place of NaN; NaN stays where they have no value."""
    x = x.copy()
    for mine, own in _groups(groups, train):
        there = x[own & ~np.isnan(x)]
        if len(there):
            x[mine & np.isnan(x)] = np.median(there)
    return x


def filled_words(words: np.ndarray, groups: np.ndarray, train: np.ndarray) -> np.ndarray:
    """words (n,) with the group's most frequent one, of equals the first by letters, in the place of ""."""
    words = words.copy()
    for mine, own in _groups(groups, train):
        there = words[own & (words != "")]
        if len(there):
            found, counts = np.unique(there.astype(str), return_counts=True)
            words[mine & (words == "")] = str(found[counts.argmax()])
    return words


def one_hot(words: np.ndarray, values: Sequence[str]) -> np.ndarray:
    """(n, values) 0 or 1; a word that is none of the values is a row of zeros."""
    return (words[:, None] == np.array(values, dtype=object)[None, :]).astype(np.float64)


def standardised(x: np.ndarray, groups: np.ndarray, train: np.ndarray) -> np.ndarray:
    """(x - mean) / deviation by the group's training rows, (n, f); NaN, and a column that does not vary, become 0."""
    out = np.zeros_like(x)
    for mine, own in _groups(groups, train):
        mean, std = moments(x[own])
        np.divide(x - mean, std, out=out, where=mine[:, None] & (std > 0) & ~np.isnan(x))
    return out


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (f,) of the values present, and standard deviation (f,) after filling gaps with it; 0, 0 without values."""
    there = ~np.isnan(x)
    count = there.sum(0)
    mean = np.where(there, x, 0).sum(0) / np.maximum(count, 1)
    deviation = np.where(there, x - mean, 0)
    # Decided by the values, not by the deviation: the rounded mean of equal numbers may differ from them by 1e-17.
    varies = np.where(there, x, -np.inf).max(0, initial=-np.inf) > np.where(there, x, np.inf).min(0, initial=np.inf)
    return mean, np.where(varies, np.sqrt((deviation**2).sum(0) / max(len(x), 1)), 0.0)
