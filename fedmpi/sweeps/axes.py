"""Axes of a sweep, each label of which stands for some settings, and published results for combinations of labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.common.type_descriptions import shorten_value
from fedmpi.config import loading
from fedmpi.config.field_types import Section
from fedmpi.config.yaml_source import ConfigLayer

SEED = "seed"
SUMMARY_PARTS = ("last", "mean_last_10", "best", "selected")  # parts of summary.json that contain metrics


@dataclass(frozen=True)
class Axis:
    """One axis of a sweep: its name, and the settings that each of its labels stands for."""

    name: str
    choices: dict[str, ConfigLayer]  # label -> settings
    is_key: bool  # whether the axis varies one config key; the name of the axis is then that key

    def format_slug(self, label: str) -> str:
        """Convert a label to the form in which it appears in the names of run directories.

        >>> Axis("lr", {}, True).format_slug("0.1"), Axis("method", {}, False).format_slug("FedAvg (FT)")
        ('lr-0.1', 'fedavg-ft')
        """
        label = label.replace("e+", "e") if self.is_key else label  # without its sign, 1e+30 would look like 1e-30
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.").lower() or "x"
        return f"{self.name.rpartition('.')[2]}-{slug}" if self.is_key else slug

    def sets_key(self, key: str) -> bool:
        """Return whether this axis sets a config key, directly or by choosing the component that has this option."""
        if self.is_key:
            return key == self.name
        plugin_keys = {
            plugin for plugin in loading.PLUGIN_KEYS for layer in self.choices.values() if plugin in layer.origins
        }
        return any(key in (plugin, plugin.rpartition(".")[0]) for plugin in plugin_keys)


def read_axis(path: Path, document: ConfigLayer, name: str, value: Any, parent_key: str = "grid") -> Axis:
    """Read one axis of a sweep file.

    Args:
        path: the sweep file, for messages.
        document: the content of the sweep file.
        value: a list of values or of config files, or a mapping of labels to settings.
        parent_key: the key of the sweep file that contains the axis.

    Raises:
        UserError: if the axis is invalid or empty, or has the same label twice.
    """
    where = f"{document.origins.get(f'{parent_key}.{name}', path)}: {parent_key}.{name}"
    if name in ("name", "output", "base"):
        raise UserError(
            f"{where}: cannot sweep over `{name}`: names and directories of runs are derived from the labels of the "
            "other axes; remove this axis"
        )
    if isinstance(value, dict) and value:
        layers = {
            label: _read_label_settings(document, f"{parent_key}.{name}.{label}", tree) for label, tree in value.items()
        }
        return Axis(name, layers, is_key=False)
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: {shorten_value(value)} is not allowed; must be a list of values, a list of config files, or a "
            "mapping of labels to settings"
        )
    is_key = not all(loading.is_config_file(item) for item in value)
    if not is_key:
        layers = {Path(item).stem: loading.read_with_bases(Path(item)) for item in value}
    elif any(isinstance(item, dict | list) for item in value) or name in ("method", "model", "task"):
        raise UserError(
            f"{where}: a list may contain only plain values of a key (such as {name}.name) or config files; to list "
            "settings, give each of them a label: {mine: {...}}"
        )
    else:
        layers = {_format_label(item): loading.nest_value(name, item, where) for item in value}
    if len(layers) < len(value):
        raise UserError(f"{where}: a value is listed twice, or two files have the same name; list each only once")
    return Axis(name, layers, is_key)


def _format_label(value: Any) -> str:
    """Return the label for a value of an axis, formatted as in YAML.

    >>> [_format_label(x) for x in (0.1, 1, True, None, "iid")]
    ['0.1', '1', 'true', 'null', 'iid']
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_label_settings(document: ConfigLayer, key: str, settings: Any) -> ConfigLayer:
    """Return the settings of one label, together with the file and line of each key."""
    if not isinstance(settings, dict):
        where = document.origins.get(key, "")
        raise UserError(
            f"{where}: {key}: {shorten_value(settings)} is not allowed; must be a mapping of settings, such as "
            "{train: {lr: 0.1}}"
        )
    prefix = f"{key}."
    origins = {key[len(prefix) :]: where for key, where in document.origins.items() if key.startswith(prefix)}
    return ConfigLayer(settings, origins)


def read_selected_labels(path: Path, axes: Sequence[Axis], key: str, selection: dict[str, Any]) -> dict[str, list[str]]:
    """Check a section of a sweep file that selects labels of axes, and return the selected labels of each axis.

    Args:
        path: the sweep file, for messages.
        key: the key of the section, for messages.
        selection: for each axis a label or a list of labels.

    Returns:
        A mapping of axis names to lists of labels.

    Raises:
        UserError: if an axis or a label is unknown.
    """
    axes_by_name = {axis.name: axis for axis in axes}
    labels_by_axis = {}
    for name, labels in selection.items():
        if name not in axes_by_name:
            raise UserError(f"{path}: {key}: unknown axis '{name}'; {suggest_name(name, axes_by_name)}")
        labels_by_axis[name] = [_format_label(label) for label in (labels if isinstance(labels, list) else [labels])]
        for label in labels_by_axis[name]:
            if label not in axes_by_name[name].choices:
                raise UserError(
                    f"{path}: {key}.{name}: unknown label '{label}'; {suggest_name(label, axes_by_name[name].choices)}"
                )
    return labels_by_axis


class PublishedSection(Section):
    """The section `published` of a sweep file."""

    source: str = ""
    metric: str | list[str] = "accuracy"
    axes: list[str] | None = None  # null: all axes except `seed`
    values: dict[str, Any]


@dataclass(frozen=True)
class PublishedResults:
    """The published values of one metric, with which the results of a sweep are compared."""

    source: str
    metric: str  # such as "accuracy", or "best accuracy" for the accuracy in the best round
    axes: tuple[str, ...]
    values: dict[tuple[str, ...], tuple[float, float]]  # one label of each axis -> (mean, standard deviation or nan)

    @property
    def metric_key(self) -> tuple[str, str]:
        """The section of summary.json (one of SUMMARY_PARTS) and the name of the metric in that section."""
        first, _, rest = self.metric.partition(" ")
        return (first, rest) if first in SUMMARY_PARTS and rest else ("last", self.metric)

    def find_cell(self, labels: Mapping[str, str]) -> tuple[float, float] | None:
        """Return the published mean and standard deviation for a run with these labels; None if there are none."""
        return self.values.get(tuple(labels.get(name, "") for name in self.axes))


def read_published_results(path: Path, axes: Sequence[Axis], section: PublishedSection) -> tuple[PublishedResults, ...]:
    """Check the section `published` of a sweep file, and return its values, one object for each metric.

    Raises:
        UserError: if an axis or a label is unknown, or a value is not a number.
    """
    axes_by_name = {axis.name: axis for axis in axes}
    names = [name for name in axes_by_name if name != SEED] if section.axes is None else section.axes
    if not {*names} <= {*axes_by_name}:
        raise UserError(
            f"{path}: published.axes: {shorten_value(names)} is not allowed; must be a list of axes of grid: "
            f"{', '.join(axes_by_name)}"
        )
    metrics = section.metric if isinstance(section.metric, list) else [section.metric]
    values: dict[str, dict[tuple[str, ...], tuple[float, float]]] = {metric: {} for metric in metrics}
    for labels, cell in _iterate_cells(
        section.values, [axes_by_name[name] for name in names], f"{path}: published.values"
    ):
        where = ".".join([f"{path}: published.values", *labels])
        cell_values = cell if isinstance(section.metric, list) else [cell]
        if not isinstance(cell_values, list) or len(cell_values) != len(metrics):
            raise UserError(
                f"{where}: {shorten_value(cell)} is not allowed; must be a list with one value per metric: "
                f"{', '.join(metrics)}"
            )
        for metric, cell_value in zip(metrics, cell_values, strict=True):
            if cell_value is not None:
                values[metric][labels] = _parse_mean_and_deviation(where, cell_value)
    return tuple(
        PublishedResults(section.source, metric, tuple(names), values_of_metric)
        for metric, values_of_metric in values.items()
    )


def _iterate_cells(tree: Any, axes: Sequence[Axis], where: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the labels and the value of each cell of nested mappings that have one level per axis."""
    if not axes:
        yield (), tree
        return
    if not isinstance(tree, dict):
        raise UserError(
            f"{where}: {shorten_value(tree)} is not allowed; must be a mapping of labels of the axis {axes[0].name}"
        )
    for label, subtree in tree.items():
        if label not in axes[0].choices:
            raise UserError(
                f"{where}: unknown label '{label}' of the axis {axes[0].name}; {suggest_name(label, axes[0].choices)}"
            )
        for labels, cell in _iterate_cells(subtree, axes[1:], f"{where}.{label}"):
            yield (label, *labels), cell


def _parse_mean_and_deviation(where: str, value: Any) -> tuple[float, float]:
    """Return a published mean and its standard deviation, which is nan if it was not published."""
    mean_and_deviation = value if isinstance(value, list) else [value, math.nan]
    are_numbers = len(mean_and_deviation) == 2 and all(type(x) in (int, float) for x in mean_and_deviation)
    if (
        not are_numbers
        or not math.isfinite(mean_and_deviation[0])
        or mean_and_deviation[1] < 0
        or mean_and_deviation[1] == math.inf
    ):
        raise UserError(
            f"{where}: {shorten_value(value)} is not allowed; must be a finite number, the mean, or [mean, standard "
            "deviation]"
        )
    return float(mean_and_deviation[0]), float(mean_and_deviation[1])
