"""A sweep's table as a picture: `fedmpi table --to FILE.png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedmpi.analysis.figures import COLOURS, DASHES, MARKERS, _new, _plain

if TYPE_CHECKING:
    from fedmpi.analysis.figures import Figure


def draw(lines: Mapping[str, Sequence[tuple[str, float, float]]], x_label: str, y_label: str) -> Figure:
    """A line for each name: (label on the x axis, mean, standard deviation or nan), in the labels' order; a mean that
    is nan is a gap.

    Where all labels are numbers they have their places, on a logarithmic axis where they span a factor of 30, and the
    axis runs the way in which they stand: alphas from 100 to 0.01 to the right. Words have no order: points alone.
    """
    figure = _new(5.4, 4.2)
    axes = figure.subplots()
    labels = list(dict.fromkeys(label for points in lines.values() for label, _, _ in points))
    at = _numbers(labels)
    places = at or list(range(len(labels)))
    log = at is not None and min(at) > 0 and max(at) >= 30 * min(at)
    if log:
        axes.set_xscale("log")
    for i, (name, points) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)] if at else ""}
        beside = 0.008 * (i - (len(lines) - 1) / 2)  # of the axis, or one line's bars would hide another's
        place = dict(zip(labels, _moved(places, beside, log), strict=True))
        x, y, spread = (list(each) for each in zip(*((place[a], m, s) for a, m, s in points), strict=True))
        axes.errorbar(x, y, spread, marker=MARKERS[i % len(MARKERS)], markersize=4.5, capsize=3, label=name, **style)
    if at:
        axes.set_xticks(at, labels)
        axes.minorticks_off()
    else:
        axes.set_xticks(range(len(labels)), labels, rotation=20 if max(map(len, labels)) > 8 else 0)
    if at and at[0] > at[-1]:
        axes.invert_xaxis()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if any(lines):
        axes.legend(frameon=False)
    return _plain(figure)


def _numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _moved(places: Sequence[float], share: float, log: bool) -> list[float]:
    """The places, moved along by a share of the axis."""
    low, high = min(places), max(places)
    return [x * (high / low) ** share if log else x + share * (high - low) for x in places]
