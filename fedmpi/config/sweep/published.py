"""What others report of the cells of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest, show
from fedmpi.config.sweep.axes import SEED, Axis


@dataclass(frozen=True)
class Published:
    """What others report: (label of each axis in `axes`) -> (mean, standard deviation or nan)."""

    source: str
    metric: str
    axes: tuple[str, ...]
    values: dict[tuple[str, ...], tuple[float, float]]


def read(path: Path, axes: Sequence[Axis], given: Any) -> Published | None:
    """The section `published`. Raises UserError."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("values"), dict):
        raise UserError(f"{path}: published: {show(given)}; source, metric and values are needed")
    unknown = given.keys() - {"source", "metric", "axes", "values"}
    if unknown:
        raise UserError(f"{path}: published: unknown key '{min(unknown)}'; allowed: source, metric, axes, values")
    names = given.get("axes", [axis.name for axis in axes if axis.name != SEED])
    known = {axis.name: axis for axis in axes}
    if not isinstance(names, list) or any(name not in known for name in names):
        raise UserError(f"{path}: published.axes: {show(names)}; a list of {', '.join(known)} is needed")
    found: dict[tuple[str, ...], tuple[float, float]] = {}

    def walk(tree: Any, so_far: tuple[str, ...]) -> None:
        where = f"{path}: published.values" + "".join(f".{label}" for label in so_far)
        if len(so_far) == len(names):
            found[so_far] = _figure(where, tree)
            return
        axis = known[names[len(so_far)]]
        if not isinstance(tree, dict):
            raise UserError(f"{where}: {show(tree)}; labels of {axis.name} are needed")
        for label, below in tree.items():
            if label not in axis.choices:
                raise UserError(f"{where}: unknown label '{label}' of {axis.name}; {nearest(label, axis.choices)}")
            walk(below, (*so_far, label))

    walk(given["values"], ())
    return Published(str(given.get("source", "")), str(given.get("metric", "accuracy")), tuple(names), found)


def _figure(where: str, given: Any) -> tuple[float, float]:
    pair = given if isinstance(given, list) else [given, math.nan]
    if len(pair) != 2 or not all(type(x) in (int, float) for x in pair):
        raise UserError(f"{where}: {show(given)}; a mean, or [mean, standard deviation], is needed")
    return float(pair[0]), float(pair[1])
