"""Read run directories for reports, and average over groups of runs that differ only in their seeds.

A directory may be incomplete or damaged, or belong to a run that is still training.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

import yaml

from fedmpi.analysis.charts import LineChart, Series
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.metrics_row import NON_METRIC_NAMES
from fedmpi.common.text import is_lower_better, pluralize
from fedmpi.config import yaml_source
from fedmpi.config.field_types import flatten
from fedmpi.reports.page import Figure, Value
from fedmpi.runtime.inspection.run_files import (
    SWEEP_FILE,
    check_written_by_this_version,
    not_a_run_error,
    read_json_object,
)
from fedmpi.runtime.record import data_files

Row = dict[str, Any]
Curve = dict[int, float]  # round -> value
REQUIRED_FILES = ("config.yaml", "metrics.jsonl", "environment.json", "partition.json")
RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json")  # a run directory contains at least one of these
KEYS_IGNORED_IN_GROUPS = ("seed", "name", "output")  # settings in which runs of one group may differ
T = TypeVar("T")


class Run:
    """The records in one run directory.

    If a file cannot be read, its records are empty, and a remark is added to `notes`.

    Attributes:
        path: the run directory.
        notes: remarks on files that are missing or damaged.
        config: the settings of the run, by dotted key.
        rows: the rows of metrics.jsonl.
        clients, faults, analysis: the rows of clients.jsonl, faults.jsonl and analysis.jsonl.
        updates: the rows of update_stats.jsonl.
        summary, environment, identity, partition: the content of the JSON file with this name.
        state: why the run ended, or a remark that it has not ended.
        complete: whether the run finished or was stopped early by evaluate.best.patience.
        rounds: the numbers of the finished rounds.
        last_hash: SHA-256 of the model after the last round.
        last: the last recorded value of each metric; None if this value is not a finite number.
        metrics: the names of the metrics of training and evaluation; metrics for which higher is better come first.
        method_metrics: the names of the metrics that the method recorded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = [f"there is no {name}" for name in REQUIRED_FILES if not (path / name).exists()]
        self.config = self._read_config()
        check_written_by_this_version(path, self.config)
        self.rows, self.clients, self.faults, self.updates, self.analysis = (
            self.read_rows(f"{name}.jsonl") for name in ("metrics", "clients", "faults", "update_stats", "analysis")
        )
        self.summary, self.environment, self.identity, self.partition, self.privacy = (
            self._read_json(f"{name}.json") for name in ("summary", "environment", "identity", "partition", "privacy")
        )
        self.name, self.seed = str(self.config.get("name", path.name)), str(self.config.get("seed", ""))
        self.state = str(self.summary.get("exit_reason", "")) or "not ended (still running, or killed)"
        self.complete = self.state == "finished" or self.state.startswith(("early_stopped", "budget_spent"))
        self.rounds = [row["round"] for row in self.rows if row["round"] >= 0]
        self.last_hash = next((row["sha256"] for row in reversed(self.rows) if row.get("sha256")), None)
        self.last = {name: finite_number(value) for row in self.rows for name, value in row.items()}
        numbers, own = dict[str, None](), set[str]()
        for row in self.rows:
            names = list(row)
            numbers |= dict.fromkeys(name for name in names if finite_number(row[name]) is not None)
            if "server_s" in names and "sent_bytes" in names:  # the method's metrics are between these two keys
                own.update(names[names.index("server_s") + 1 : names.index("sent_bytes")])
        self.method_metrics = [name for name in numbers if name in own]
        self.metrics = sorted(
            (name for name in numbers if name not in own and name not in NON_METRIC_NAMES), key=self.is_lower_better
        )

    @cached_property
    def samples_by_client(self) -> tuple[Any, Any]:
        """The numbers of training samples by client, (N,), and by client and class, (N, C); None if not recorded."""
        try:
            return data_files.read_client_sizes(self.path, self.partition)
        except ValueError as error:
            self.notes.append(str(error))
            return None, None

    @cached_property
    def client_names(self) -> dict[int, str]:
        """The name of each client's site, followed by the number of the client if the site has several clients."""
        silos = self.config.get("data.silos")
        names = dict(enumerate(map(str, silos))) if isinstance(silos, list) else {}
        for row in self.clients:
            if "site" in row and isinstance(row.get("client"), int):
                names[row["client"]] = str(row["site"])
        many = Counter(names.values())
        return {k: name if many[name] < 2 else f"{name} ({k})" for k, name in names.items()}

    def is_lower_better(self, name: str) -> bool:
        """Return whether lower values of a metric are better."""
        own = self.summary.get("lower_is_better")
        return is_lower_better(name, map(str, own) if isinstance(own, list) else ())

    def read_rows(self, name: str, *, rounds: bool = True) -> list[Row]:
        """Return the valid rows of a .jsonl file; if any lines are damaged, add a remark with their number to `notes`.

        rounds: whether a row without the key `round` counts as damaged.
        """
        try:
            content = read_jsonl(self.path / name, need_round=rounds)
        except UserError as error:
            self.notes.append(str(error))
            return []
        if bad := len(content.damaged_lines) + content.is_truncated:
            self.notes.append(f"{name}: {pluralize(bad, 'incomplete or damaged line')} ignored")
        return content.rows

    def _read_config(self) -> Row:
        """Return the settings in config.yaml by dotted key; {} if the file cannot be read."""
        path = self.path / "config.yaml"
        try:
            if path.exists() and yaml_source.REFERENCE_START not in yaml_source.read_config_text(path):
                return flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, "")
            if path.exists():  # references could reveal environment variables; fedmpi never writes any
                self.notes.append("config.yaml contains references to environment variables, and was not read")
        except (UserError, yaml.YAMLError, AttributeError):
            self.notes.append("config.yaml is not valid YAML, and was not read")
        return {}

    def _read_json(self, name: str) -> Row:
        """Return the content of a JSON file; {} if it does not exist or is damaged."""
        value = read_json_object(self.path / name)
        if value is None and (self.path / name).exists():
            self.notes.append(f"{name} is damaged: it contains no JSON object")
        return value or {}


# ---- values of rows ----
def finite_number(value: Any) -> float | None:
    """Return a value as a float if it is a finite number, and None otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def finite_numbers(values: Any) -> list[float]:
    """Return the finite numbers in `values`; [] if it is not a list."""
    return [v for each in values if (v := finite_number(each)) is not None] if isinstance(values, list) else []


def extract_curve(rows: Iterable[Row], *keys: str) -> Curve:
    """Return one number from each row, by round; rows without this number are left out.

    Args:
        rows: rows with a key `round`.
        keys: path of the number in a row, one key for each level. If it leads to a list, the mean of the list is used.

    >>> extract_curve([{"round": 3, "drift": {"norms": [1.0, 2.0]}}, {"round": 4}], "drift", "norms")
    {3: 1.5}
    """
    points = {}
    for row in rows:
        value: Any = row
        for key in keys:
            if isinstance(value, list) and key.isdigit():
                value = dict(enumerate(value)).get(int(key))
            else:
                value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, list):
            value = fmean(known) if (known := finite_numbers(value)) else None
        if (v := finite_number(value)) is not None:
            points[row["round"]] = v
    return points


def subsample(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spaced and beginning with the first."""
    return list(items)[:: max(-(-len(items) // most), 1)]


def strip_folders(value: Any) -> str:
    """Return the value of a setting as a string, without the folders if it is a path.

    >>> strip_folders("/home/me/mine.py:Mine"), strip_folders("fedavg")
    ('mine.py:Mine', 'fedavg')
    """
    return "" if value is None else str(value).rpartition("/")[2]


# ---- groups of runs ----
class RunGroup(NamedTuple):
    """Runs that differ only in their seeds, names and output directories.

    Attributes:
        name: "mean of n runs" if there is only one group; otherwise the labels of its runs in the sweep or, if groups
            cannot be told apart by their labels, the name of its first run.
    """

    name: str
    runs: list[Run]


class RunCollection:
    """The runs that a report describes.

    Attributes:
        all: all runs.
        single: the run if there is only one, otherwise None.
        differing_keys: the keys of settings that differ between runs, except seed, name and output.
        groups: the runs, grouped by equal settings, apart from seed, name and output.
        run_names: dict from the path of each run to a unique name.
        metrics: the names of the metrics of all runs; metrics for which higher is better come first.
    """

    def __init__(self, every: Sequence[Run]) -> None:
        self.all = list(every)
        self.single = self.all[0] if len(self.all) == 1 else None
        keys = dict.fromkeys(key for run in every for key in run.config if key not in KEYS_IGNORED_IN_GROUPS)
        self.differing_keys = [
            key for key in keys if not self.single and len({format_setting(run, key) for run in every}) > 1
        ]
        self.groups = [RunGroup(self.single.name, self.all)] if self.single else self._group_runs()
        unique = len({run.name for run in self.all}) == len(self.all)
        self.run_names = {run.path: run.name if unique else str(run.path) for run in self.all}
        falls = {name: run.is_lower_better(name) for run in self.all for name in run.metrics}
        self.metrics = sorted(falls, key=lambda name: falls[name])

    def _group_runs(self) -> list[RunGroup]:
        """Group the runs by the settings in `differing_keys`, and name the groups."""
        by_values: dict[tuple[str, ...], list[Run]] = {}
        for run in self.all:
            by_values.setdefault(tuple(format_setting(run, key) for key in self.differing_keys), []).append(run)
        groups = list(by_values.values())
        if len(groups) == 1:
            return [RunGroup(f"mean of {len(self.all)} runs", self.all)]
        names = find_names_in_sweep([group[0] for group in groups]) or [group[0].name for group in groups]
        return [RunGroup(name, group) for name, group in zip(names, groups, strict=True)]


def read_runs(paths: Sequence[Path]) -> RunCollection:
    """Read all runs in the given directories, each of which is a run directory or the directory of a sweep.

    Raises:
        UserError: if a directory does not exist or contains no run.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; give a directory that `fedmpi run` or `fedmpi sweep` wrote")
        inside = [path] if is_run_directory(path) else [each for each in path.iterdir() if is_run_directory(each)]
        names = (read_json_object(path / SWEEP_FILE) or {}).get(
            "runs"
        )  # runs in the order of the sweep; others come last
        order = {name: i for i, name in enumerate(map(str, names))} if isinstance(names, list) else {}
        inside.sort(key=lambda each: (order.get(each.name, len(order)), each))
        if not inside:
            raise not_a_run_error(path, f"{', '.join(RUN_FILES)}, and no directory that does")
        runs |= {each.resolve(): Run(each) for each in inside}
    return RunCollection(list(runs.values()))


def is_run_directory(path: Path) -> bool:
    """Return whether a directory contains at least one file of a run."""
    return any((path / name).is_file() for name in RUN_FILES)


def format_setting(run: Run, key: str) -> str:
    """Return the value of a setting as a string; "-" if the config of the run does not contain the setting."""
    value = run.config.get(key, "-")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def find_names_in_sweep(runs: Sequence[Run]) -> list[str] | None:
    """Name each run by its labels in the sweep; return None if these labels do not distinguish the runs."""
    labels = list[dict[str, str]]()
    for place in (run.path.resolve() for run in runs):
        known = (read_json_object(place.parent / SWEEP_FILE) or {}).get("labels")
        own = known.get(place.name) if isinstance(known, dict) else None
        pairs = own.items() if isinstance(own, dict) else ()
        labels.append({str(axis): str(label) for axis, label in pairs if axis != "seed"})
    axes = [axis for axis in labels[0] if len({each.get(axis) for each in labels}) > 1]
    names = [", ".join(format_axis_label(axis, each[axis]) for axis in axes if axis in each) for each in labels]
    return names if axes and len(set(names)) == len(names) else None


def format_axis_label(axis: str, label: str) -> str:
    """Format the label of one axis of a sweep, preceded by the name of the axis if the label alone would be unclear.

    >>> format_axis_label("method", "fedavg"), format_axis_label("train.lr", "0.1"), format_axis_label("width", "8")
    ('fedavg', 'lr 0.1', 'width 8')
    """
    plain = "." not in axis and not label.replace(".", "").isdigit()
    return label if plain else f"{axis.rpartition('.')[2]} {label}"


# ---- curves of groups ----
def compute_mean_and_std_by_round(curves: Iterable[Curve]) -> dict[int, tuple[float, float | None, int]]:
    """Compute the mean and the standard deviation of several curves in each round.

    Returns:
        For each round: the mean, the sample standard deviation (None for a single curve), and the number of curves that
        have a value in this round.
    """
    by_round: dict[int, list[float]] = {}
    for each in curves:
        for t, value in each.items():
            by_round.setdefault(t, []).append(value)
    return {t: (fmean(v), stdev(v) if len(v) > 1 else None, len(v)) for t, v in sorted(by_round.items())}


def average_curves(curves: Iterable[Curve]) -> Curve:
    """Return the mean of several curves, by round."""
    return {t: mean for t, (mean, _, _) in compute_mean_and_std_by_round(curves).items()}


def plot_by_group(
    runs: RunCollection,
    name: str,
    title: str,
    y_label: str,
    curves: Mapping[Path, Curve],
    column: str = "",
    note: str = "",
) -> Figure | None:
    """Plot one line for each group of runs: the curve of a single run, or the mean ± std of several runs.

    Args:
        runs: the runs.
        name: base name of the figure's files.
        title: its title.
        y_label: label of the y axis.
        curves: dict from the path of each run to its values by round.
        column: heading of the column of means in the CSV file; "": `name`.
        note: text below the figure.

    Returns:
        The figure, or None if there are no values.
    """
    series, data = list[Series](), list[list[Value]]()
    least, most = (0.0, 100.0) if y_label.endswith("(%)") else (-math.inf, math.inf)  # limits of a band
    for group in runs.groups:
        by_round = compute_mean_and_std_by_round(curves[run.path] for run in group.runs)
        if by_round:
            band = [(max(m - (s or 0.0), least), min(m + (s or 0.0), most)) for m, s, _ in by_round.values()]
            low, high = zip(*band, strict=True) if len(group.runs) > 1 else ((), ())
            series.append(Series(group.name, list(by_round), [m for m, _, _ in by_round.values()], low, high))
            data += [[group.name, t, *facts] for t, facts in by_round.items()]
    head = ("settings", "round", column or name, "std", "runs")
    return Figure(name, title, LineChart(series, "round", y_label), head, data, note) if series else None


def plot_curves(
    name: str, title: str, y_label: str, curves: Mapping[str, Curve], head: Sequence[str] = (), note: str = "",
    from_zero: bool = False,
) -> Figure | None:  # fmt: skip
    """Plot one line for each curve over rounds.

    Args:
        name: base name of the figure's files.
        title: its title.
        y_label: label of the y axis.
        curves: dict from the label of each line to its values by round.
        head: headings of the columns of the CSV file, one per curve; (): the labels of the curves.
        note: text below the figure.
        from_zero: whether the y axis begins at 0.

    Returns:
        The figure, or None if all curves are empty.
    """
    rounds = sorted({t for each in curves.values() for t in each})
    series = [Series(label, rounds, [each.get(t) for t in rounds]) for label, each in curves.items() if each]
    data: list[list[Value]] = [[t, *(each.get(t) for each in curves.values())] for t in rounds]
    chart = LineChart(series, "round", y_label, from_zero=from_zero)
    return Figure(name, title, chart, ("round", *(head or curves)), data, note) if series else None
