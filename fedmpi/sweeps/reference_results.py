"""Published results for the cells of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest, show
from fedmpi.sweeps.axes import SEED, Axis

OF = ("last", "mean_last_10", "best", "selected")  # parts of summary.json
KEYS = ("source", "metric", "axes", "values")


@dataclass(frozen=True)
class Published:
    """Published values of one metric: (label of each axis in `axes`) -> (mean, standard deviation or nan)."""

    source: str
    metric: str  # accuracy; "best accuracy": that of the best round
    axes: tuple[str, ...]
    values: dict[tuple[str, ...], tuple[float, float]]

    @property
    def figure(self) -> tuple[str, str]:
        """The part of summary.json (one of OF), and the name of the metric."""
        first, _, rest = self.metric.partition(" ")
        return (first, rest) if first in OF and rest else ("last", self.metric)

    def value(self, labels: Mapping[str, str]) -> tuple[float, float] | None:
        """Return the mean and the standard deviation of a cell, by a label of each axis."""
        return self.values.get(tuple(labels.get(name, "") for name in self.axes))


def read(path: Path, axes: Sequence[Axis], given: Any) -> tuple[Published, ...]:
    """Read the section `published`: one `Published` for each metric. Raises UserError."""
    if given is None:
        return ()
    if not isinstance(given, dict) or not isinstance(given.get("values"), dict):
        raise UserError(f"{path}: published: {show(given)}; source, metric and values are needed")
    if unknown := given.keys() - {*KEYS}:
        raise UserError(f"{path}: published: unknown key '{min(unknown)}'; {nearest(min(unknown), KEYS)}")
    known = {axis.name: axis for axis in axes}
    names = given.get("axes", [name for name in known if name != SEED])
    if not isinstance(names, list) or any(name not in known for name in names):
        raise UserError(f"{path}: published.axes: {show(names)}; a list of {', '.join(known)} is needed")
    metrics = given.get("metric", "accuracy")
    several = isinstance(metrics, list)
    metrics = [str(metric) for metric in metrics] if several else [str(metrics)]
    values: dict[str, dict[tuple[str, ...], tuple[float, float]]] = {metric: {} for metric in metrics}

    def walk(tree: Any, labels: tuple[str, ...]) -> None:
        where = f"{path}: published.values" + "".join(f".{label}" for label in labels)
        if len(labels) == len(names):
            figures = tree if several else [tree]
            if not isinstance(figures, list) or len(figures) != len(metrics):
                raise UserError(f"{where}: {show(tree)}; a list with a figure of each metric is needed: {metrics}")
            for metric, each in zip(metrics, figures, strict=True):
                if each is not None:
                    values[metric][labels] = _figure(where, each)
            return
        axis = known[names[len(labels)]]
        if not isinstance(tree, dict):
            raise UserError(f"{where}: {show(tree)}; labels of {axis.name} are needed")
        for label, below in tree.items():
            if label not in axis.choices:
                raise UserError(f"{where}: unknown label '{label}' of {axis.name}; {nearest(label, axis.choices)}")
            walk(below, (*labels, label))

    walk(given["values"], ())
    source = str(given.get("source", ""))
    return tuple(Published(source, metric, tuple(names), of_metric) for metric, of_metric in values.items())


def _figure(where: str, given: Any) -> tuple[float, float]:
    pair = given if isinstance(given, list) else [given, math.nan]
    numbers = len(pair) == 2 and all(type(x) in (int, float) for x in pair)
    if not numbers or not math.isfinite(pair[0]) or pair[1] < 0 or pair[1] == math.inf:
        raise UserError(f"{where}: {show(given)}; a finite mean, or [mean, standard deviation], is needed")
    return float(pair[0]), float(pair[1])
