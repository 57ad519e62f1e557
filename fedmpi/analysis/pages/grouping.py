"""Means and spreads over the runs of a group; figures that show every group as a line with its band."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, isnan, nan
from statistics import fmean, stdev

from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Figure, Lines, Series, Value

Curve = dict[int, float]  # round -> value
BAND = "A line with a band is the mean of runs that differ in their seeds alone, and one sample standard deviation."


def means(curves: Iterable[Curve]) -> dict[int, tuple[float, float, int]]:
    """round -> mean, sample standard deviation (nan of one run), runs that have the round."""
    found: dict[int, list[float]] = {}
    for curve in curves:
        for t, value in curve.items():
            found.setdefault(t, []).append(value)
    return {t: (fmean(v), stdev(v) if len(v) > 1 else nan, len(v)) for t, v in sorted(found.items())}


def figure(
    runs: Runs, name: str, title: str, y_label: str, curve: Callable[[Run], Curve], column: str = "", note: str = ""
) -> Figure | None:
    """A line for each group; None where no run has a value."""
    series, data = list[Series](), list[list[Value]]()
    least, most = (0.0, 100.0) if y_label.endswith("(%)") else (-inf, inf)  # a band ends where there is nothing to be
    for group in runs.groups:
        found = means(map(curve, group.runs))
        if not found:
            continue
        spread = [(m, 0.0 if isnan(s) else s) for m, s, _ in found.values()] if len(group.runs) > 1 else []
        band = [(max(m - s, least), min(m + s, most)) for m, s in spread]
        y = [m for m, _, _ in found.values()]
        series.append(Series(group.name(), list(found), y, [low for low, _ in band], [high for _, high in band]))
        data += [[group.name(), t, m, None if isnan(s) else s, many] for t, (m, s, many) in found.items()]
    head = ("settings", "round", column or name, "std", "runs")
    chart = Lines(series, "round", y_label)
    return Figure(name, title, chart, head, data, note) if series else None


def rounds_in(run: Run, name: str) -> Curve:
    """A figure of metrics.jsonl, where it is a number."""
    return dict(zip(*run.series(name), strict=True))


def title(name: str) -> str:
    """A figure's name in words."""
    return name.replace("_", " ")


def spoken(name: str) -> str:
    """A figure's name in words, with its unit.

    >>> spoken("personal_accuracy"), spoken("loss")
    ('personal accuracy (%)', 'loss')
    """
    return name.replace("_", " ") + (" (%)" if "accuracy" in name else "")
