"""The picture of `fedmpi analyse trajectory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedmpi.analysis.figures import BLUE, GREEN, ORANGE, RED, _new, _plain

if TYPE_CHECKING:
    from fedmpi.analysis.figures import Figure


def trajectory(facts: Mapping[str, Any]) -> Figure:
    """Left: training loss by round. Middle: both ways over the loss of the plane. Right: some rounds of the first way,
    with their local and virtual clients."""
    figure = _new(12.6, 4.2)
    left, middle, right = figure.subplots(1, 3)
    looks = ((RED, "-", "o"), (BLUE, "--", "s"))
    for (name, way), (colour, dash, marker) in zip(facts["ways"].items(), looks, strict=True):
        left.plot(range(len(way["loss"])), way["loss"], dash, color=colour, marker=marker, markersize=3, label=name)
        x, y = zip(*way["at"], strict=True)
        middle.plot(x, y, dash, color=colour, marker=marker, markersize=4, label=name)
    middle.plot(*next(iter(facts["ways"].values()))["at"][0], "*", color=ORANGE, markersize=13, label="start of both")
    left.set_xlabel("communication round")
    left.set_ylabel("training loss")
    own = next(iter(facts["ways"].values()))["at"][facts["first"] : facts["last"] + 1]
    kinds: tuple[tuple[bool, str, str, str], ...] = (
        (True, "v", BLUE, "local atoms and coefficients"),
        (False, "x", GREEN, "virtual clients"),
    )
    for same, marker, colour, label in kinds:
        at = [m["at"] for each in facts["rounds"] for m in each["models"] if (m["alpha"] == m["atoms"]) == same]
        if at:
            right.scatter(*zip(*at, strict=True), marker=marker, color=colour, s=26, linewidth=1.1, label=label)
    label = f"global model, rounds {facts['first']} to {facts['last']}"
    right.plot(*zip(*own, strict=True), color=RED, marker="o", markersize=5, label=label)
    for axes, key in ((middle, "landscape"), (right, "near")):
        ground = facts[key]
        contours = axes.contour(ground["x"], ground["y"], ground["loss"], levels=10, colors="0.6", linewidths=0.8)
        axes.clabel(contours, fontsize="x-small", fmt="%.3g")
        axes.set_xlabel("along the first principal direction")
        axes.set_ylabel("along the second")
    for axes in (left, middle, right):
        axes.legend(fontsize="small", framealpha=0.9)
    return _plain(figure)
