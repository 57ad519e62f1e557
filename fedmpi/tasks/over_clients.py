"""Figures of all clients from those of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Figures = dict[str, float]


def spread(name: str, values: Sequence[float], falling: bool = False) -> Figures:
    """Mean, population standard deviation and mean of the worst tenth (at least one) of the clients; nan left out.
    falling: less is better.

    >>> spread("accuracy", [90.0, 70.0])
    {'accuracy': 80.0, 'accuracy_std': 10.0, 'accuracy_worst_decile': 70.0}
    """
    found = np.sort(np.array([v for v in values if not np.isnan(v)], dtype=np.float64))
    if falling:
        found = found[::-1]  # worst first
    if not len(found):
        return dict.fromkeys((name, f"{name}_std", f"{name}_worst_decile"), float("nan"))
    worst = found[: max(len(found) // 10, 1)]
    return {name: float(found.mean()), f"{name}_std": float(found.std()), f"{name}_worst_decile": float(worst.mean())}


def pooled(rows: Mapping[int, Figures], weights: Mapping[int, float]) -> Figures:
    """Weighted mean of per-client figures, without clients that lack the figure or weigh nothing. That is what silos
    have of every figure, of one of rankings (AUROC, C-index) too: outputs stay where their samples are."""
    out = {}
    for name in next(iter(rows.values())):
        pairs = [(weights[k], row[name]) for k, row in sorted(rows.items()) if weights[k] and not np.isnan(row[name])]
        total = sum(n for n, _ in pairs)
        out[name] = sum(n * v for n, v in pairs) / total if total else float("nan")
    return out
