"""The axes of a sweep, which vary settings under labels, and published values for combinations of these labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten_repr, suggest_name
from fedmpi.config import loading
from fedmpi.config.field_types import Section
from fedmpi.config.yaml_source import ConfigLayer

SEED = "seed"
SUMMARY_PARTS = ("last", "mean_last_10", "best", "selected")  # parts of summary.json that contain metrics


@dataclass(frozen=True)
class Axis:
    """One axis of a sweep: a name, and labels that stand for settings."""

    name: str
    choices: dict[str, ConfigLayer]  # label -> settings
    is_key: bool  # whether the axis varies the values of one key, which is its name

    def slug(self, label: str) -> str:
        """Return a label in the form that it has in the name of a run's directory.

        >>> Axis("data.partition.alpha", {}, True).slug("0.1"), Axis("method", {}, False).slug("FedAvg (FT)")
        ('alpha-0.1', 'fedavg-ft')
        """
        label = label.replace("e+", "e") if self.is_key else label  # without its sign, 1e+30 would look like 1e-30
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.").lower() or "x"
        return f"{self.name.rpartition('.')[2]}-{plain}" if self.is_key else plain

    def sets_key(self, key: str) -> bool:
        """Return whether a key is the one that this axis varies, or selects a component that the axis varies."""
        if self.is_key:
            return key == self.name
        chosen = {
            plugin for plugin in loading.PLUGIN_KEYS for layer in self.choices.values() if plugin in layer.origins
        }
        return any(key in (plugin, plugin.rpartition(".")[0]) for plugin in chosen)


def read_axis(path: Path, document: ConfigLayer, name: str, given: Any, below: str = "grid") -> Axis:
    """Read one axis of a sweep file.

    Args:
        given: a list of values or of config files, or a mapping of labels to settings.
        below: the key of the file that contains the axis.

    Raises:
        UserError: if the axis is invalid, empty, or has a label twice.
    """
    where = f"{document.origins.get(f'{below}.{name}', path)}: {below}.{name}"
    if name in ("name", "output", "base"):
        raise UserError(f"{where}: {name} is no axis: runs get their names and places from the labels of the others")
    if isinstance(given, dict) and given:
        layers = {
            label: _read_label_settings(document, f"{below}.{name}.{label}", tree) for label, tree in given.items()
        }
        return Axis(name, layers, is_key=False)
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: {shorten_repr(given)}; a list of values or files, or names with settings, is needed")
    is_key = not all(loading.is_config_file(item) for item in given)
    if not is_key:
        layers = {Path(item).stem: loading.read_with_bases(Path(item)) for item in given}
    elif any(isinstance(item, dict | list) for item in given) or name in ("method", "model", "task"):
        raise UserError(
            f"{where}: a list holds plain values of a key such as {name}.name, or files; give settings a name: "
            "{mine: {...}}"
        )
    else:
        layers = {_format_label(item): loading.nest_value(name, item, where) for item in given}
    if len(layers) < len(given):
        raise UserError(f"{where}: a value stands twice, or two files have one name; each once")
    return Axis(name, layers, is_key)


def _format_label(value: Any) -> str:
    """Format a value as in YAML, as the label of an axis.

    >>> [_format_label(x) for x in (0.1, 1, True, None, "iid")]
    ['0.1', '1', 'true', 'null', 'iid']
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_label_settings(document: ConfigLayer, dotted: str, tree: Any) -> ConfigLayer:
    """Return the settings of one label, with the lines in which they were written."""
    if not isinstance(tree, dict):
        where = document.origins.get(dotted, "")
        raise UserError(f"{where}: {dotted}: {shorten_repr(tree)}; settings are needed: {{train: {{lr: 0.1}}}}")
    start = f"{dotted}."
    origins = {key[len(start) :]: where for key, where in document.origins.items() if key.startswith(start)}
    return ConfigLayer(tree, origins)


def read_labels(path: Path, axes: Sequence[Axis], key: str, given: dict[str, Any]) -> dict[str, list[str]]:
    """Read a key of a sweep file that selects labels of axes.

    Args:
        key: the key, for messages.
        given: its value, {axis: label, or list of labels}.

    Returns:
        {axis: list of labels}.

    Raises:
        UserError: if an axis or a label is unknown.
    """
    known = {axis.name: axis for axis in axes}
    chosen = {}
    for name, labels in given.items():
        if name not in known:
            raise UserError(f"{path}: {key}: unknown axis '{name}'; {suggest_name(name, known)}")
        chosen[name] = [_format_label(label) for label in (labels if isinstance(labels, list) else [labels])]
        for label in chosen[name]:
            if label not in known[name].choices:
                raise UserError(
                    f"{path}: {key}.{name}: unknown label '{label}'; {suggest_name(label, known[name].choices)}"
                )
    return chosen


class PublishedSection(Section):
    """The section `published` of a sweep file."""

    source: str = ""
    metric: str | list[str] = "accuracy"
    axes: list[str] | None = None  # null: all axes except `seed`
    values: dict[str, Any]


@dataclass(frozen=True)
class PublishedResults:
    """Published values of one metric, with which the results of a sweep are compared."""

    source: str
    metric: str  # such as accuracy, or "best accuracy" for the accuracy of the best round
    axes: tuple[str, ...]
    values: dict[tuple[str, ...], tuple[float, float]]  # a label of each axis -> (mean, standard deviation or nan)

    @property
    def metric_key(self) -> tuple[str, str]:
        """The part of summary.json (one of OF) and the name of the metric in it."""
        first, _, rest = self.metric.partition(" ")
        return (first, rest) if first in SUMMARY_PARTS and rest else ("last", self.metric)

    def find_cell(self, labels: Mapping[str, str]) -> tuple[float, float] | None:
        """Return the published mean and standard deviation of a cell, {axis: label}; None if there is none."""
        return self.values.get(tuple(labels.get(name, "") for name in self.axes))


def read_published_results(path: Path, axes: Sequence[Axis], section: PublishedSection) -> tuple[PublishedResults, ...]:
    """Read the published values of a sweep file.

    Returns:
        A `Published` for each metric.

    Raises:
        UserError: if axes or labels are unknown, or values are not numbers.
    """
    known = {axis.name: axis for axis in axes}
    names = [name for name in known if name != SEED] if section.axes is None else section.axes
    if not {*names} <= {*known}:
        raise UserError(f"{path}: published.axes: {shorten_repr(names)}; a list of {', '.join(known)} is needed")
    metrics = section.metric if isinstance(section.metric, list) else [section.metric]
    values: dict[str, dict[tuple[str, ...], tuple[float, float]]] = {metric: {} for metric in metrics}
    for labels, cell in _iterate_cells(section.values, [known[name] for name in names], f"{path}: published.values"):
        where = ".".join([f"{path}: published.values", *labels])
        figures = cell if isinstance(section.metric, list) else [cell]
        if not isinstance(figures, list) or len(figures) != len(metrics):
            raise UserError(f"{where}: {shorten_repr(cell)}; a list with a figure of each metric is needed: {metrics}")
        for metric, figure in zip(metrics, figures, strict=True):
            if figure is not None:
                values[metric][labels] = _parse_mean_and_deviation(where, figure)
    return tuple(
        PublishedResults(section.source, metric, tuple(names), of_metric) for metric, of_metric in values.items()
    )


def _iterate_cells(tree: Any, axes: Sequence[Axis], where: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (labels, value) of each cell of nested mappings that have one level per axis."""
    if not axes:
        yield (), tree
        return
    if not isinstance(tree, dict):
        raise UserError(f"{where}: {shorten_repr(tree)}; labels of {axes[0].name} are needed")
    for label, below in tree.items():
        if label not in axes[0].choices:
            raise UserError(
                f"{where}: unknown label '{label}' of {axes[0].name}; {suggest_name(label, axes[0].choices)}"
            )
        for labels, cell in _iterate_cells(below, axes[1:], f"{where}.{label}"):
            yield (label, *labels), cell


def _parse_mean_and_deviation(where: str, given: Any) -> tuple[float, float]:
    pair = given if isinstance(given, list) else [given, math.nan]
    numbers = len(pair) == 2 and all(type(x) in (int, float) for x in pair)
    if not numbers or not math.isfinite(pair[0]) or pair[1] < 0 or pair[1] == math.inf:
        raise UserError(f"{where}: {shorten_repr(given)}; a finite mean, or [mean, standard deviation], is needed")
    return float(pair[0]), float(pair[1])
