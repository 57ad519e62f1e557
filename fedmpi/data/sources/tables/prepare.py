"""Arithmetic of a table's columns: what fills a gap, words as columns of 0 and 1, numbers standardised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def usual(cells: np.ndarray) -> float | str | None:
    """What stands in for a gap: the median of numbers (n,), where a gap is NaN; the most frequent of words (n,), of
    equals the first by letters, where a gap is ""; None where all are gaps."""
    if cells.dtype != object:
        there = cells[~np.isnan(cells)]
        return float(np.median(there)) if len(there) else None
    there = cells[cells != ""]
    if not len(there):
        return None
    found, counts = np.unique(there.astype(str), return_counts=True)
    return str(found[counts.argmax()])


def one_hot(words: np.ndarray, values: Sequence[str]) -> np.ndarray:
    """(n, values) 0 or 1; a word that is none of the values is a row of zeros."""
    return (words[:, None] == np.array(values, dtype=object)[None, :]).astype(np.float64)


def standardised(x: np.ndarray, mean: Sequence[float], deviation: Sequence[float]) -> np.ndarray:
    """(x - mean) / deviation, (n, f); NaN, and a column that does not vary, become 0."""
    std = np.asarray(deviation)
    return np.divide(x - np.asarray(mean), std, out=np.zeros_like(x), where=(std > 0) & ~np.isnan(x))


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (f,) of the values present, and standard deviation (f,) after filling gaps with it; 0, 0 without values."""
    there = ~np.isnan(x)
    count = there.sum(0)
    gaps = None if count.sum() == x.size else ~there  # without gaps x is not copied
    mean = (x if gaps is None else np.where(gaps, 0, x)).sum(0) / np.maximum(count, 1)
    # Decided by the values, not by the deviation: the rounded mean of equal numbers may differ from them by 1e-17.
    highest = (x if gaps is None else np.where(gaps, -np.inf, x)).max(0, initial=-np.inf)
    lowest = (x if gaps is None else np.where(gaps, np.inf, x)).min(0, initial=np.inf)
    deviation = x - mean
    if gaps is not None:
        deviation[gaps] = 0
    squares = np.square(deviation, out=deviation)
    return mean, np.where(highest > lowest, np.sqrt(squares.sum(0) / max(len(x), 1)), 0.0)
