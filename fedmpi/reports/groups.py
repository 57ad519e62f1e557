"""The runs of a report, in groups that differ only by seed, over which means are taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, stdev

from fedmpi.analysis.charts import Lines, Series
from fedmpi.common.errors import UserError
from fedmpi.reports.page import Figure, Value
from fedmpi.reports.run_data import Curve, Run, base_name
from fedmpi.runtime.reading.files import SWEEP_LIST, json_of, no_run

MARKS = ("config.yaml", "metrics.jsonl", "summary.json")  # a directory that holds one of them is a run's
UNLIKE = ("seed", "name", "output")  # settings in which runs of one group may differ


@dataclass(frozen=True)
class Group:
    """Runs that differ only by seed. name: how the settings differ from those of the other groups."""

    name: str
    runs: tuple[Run, ...]


class Runs:
    """The runs of a report.

    Attributes:
        all: the runs.
        alone: the run if there is only one, else None.
        differing: keys of settings that are not the same in all runs.
        labels: a distinct name for each run, by its path.
        metrics: those of any run, the ones of which more is better first.
    """

    def __init__(self, every: Sequence[Run]) -> None:
        self.all = tuple(every)
        self.alone = self.all[0] if len(self.all) == 1 else None
        keys = dict.fromkeys(key for run in every for key in run.config if key not in UNLIKE)
        self.differing = [key for key in keys if len({shown(run, key) for run in every}) > 1]
        self.groups = [Group(self.alone.name, self.all)] if self.alone else make_groups(self.all, self.differing)
        unique = len({run.name for run in self.all}) == len(self.all)
        self.labels = {run.path: run.name if unique else str(run.path) for run in self.all}
        falls = {name: run.falls(name) for run in self.all for name in run.metrics}
        self.metrics = sorted(falls, key=lambda name: falls[name])


def read(paths: Sequence[Path]) -> Runs:
    """Read the runs in directories: of a run itself, or of all that lie in a sweep's.

    Raises:
        UserError: no such directory, or no run in it.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no directory; name one that `fedmpi run` or `fedmpi sweep` has written")
        inside = [path] if is_run(path) else [each for each in path.iterdir() if each.is_dir() and is_run(each)]
        names = (json_of(path / SWEEP_LIST) or {}).get("runs")  # in the order of the sweep; other runs come last
        order = {name: i for i, name in enumerate(map(str, names))} if isinstance(names, list) else {}
        inside.sort(key=lambda each: (order.get(each.name, len(order)), each))
        if not inside:
            raise no_run(path, f"{', '.join(MARKS)}, and no directory that does")
        runs |= {each.resolve(): Run(each) for each in inside}
    return Runs(list(runs.values()))


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def shown(run: Run, key: str) -> str:
    value = run.config.get(key, "-")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def make_groups(runs: Sequence[Run], keys: Sequence[str]) -> list[Group]:
    """Group runs of the same settings, in their order.

    A group is named by the labels of its sweep, or by as few settings as distinguish the groups, the method first.
    """
    by_values: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        by_values.setdefault(tuple(shown(run, key) for key in keys), []).append(run)
    groups = list(by_values.values())
    names = sweep_names(groups) or names_by_settings(groups, keys)
    means = [group[0].name if len(group) == 1 else f"mean of {len(group)} runs" for group in groups]
    return [Group(name or mean, tuple(group)) for name, mean, group in zip(names, means, groups, strict=True)]


def names_by_settings(groups: Sequence[Sequence[Run]], keys: Sequence[str]) -> list[str]:
    """Return names of groups by as few settings as distinguish them: `fedprox, lr 0.1`."""
    chosen = list[str]()
    for key in sorted(keys, key=lambda key: (key != "method.name", not key.startswith("method."))):
        before, after = ({tuple(shown(g[0], k) for k in each) for g in groups} for each in (chosen, [*chosen, key]))
        if len(after) > len(before):
            chosen.append(key)
    words = [key.removesuffix(".name").rpartition(".")[2] for key in chosen]
    words = [word if words.count(word) == 1 else key for word, key in zip(words, chosen, strict=True)]
    names = []
    for group in groups:
        values = [base_name(shown(group[0], key)) for key in chosen]
        pairs = zip(words, values, strict=True)
        names.append(", ".join(value if word == "method" else f"{word} {value}" for word, value in pairs))
    return names


def sweep_names(groups: Sequence[Sequence[Run]]) -> list[str] | None:
    """Return names of groups by the labels of their sweep; None where these do not distinguish the groups."""
    labels = list[dict[str, str]]()
    for group in groups:
        place = group[0].path.resolve()
        known = (json_of(place.parent / SWEEP_LIST) or {}).get("labels")
        own = known.get(place.name) if isinstance(known, dict) else None
        pairs = own.items() if isinstance(own, dict) else ()
        labels.append({str(axis): str(label) for axis, label in pairs if axis != "seed"})
    axes = [axis for axis in labels[0] if len({each.get(axis) for each in labels}) > 1]
    names = [", ".join(axis_name(axis, each[axis]) for axis in axes if axis in each) for each in labels]
    return names if axes and len(set(names)) == len(names) else None


def axis_name(axis: str, label: str) -> str:
    """
    >>> axis_name("method", "fedavg"), axis_name("train.lr", "0.1"), axis_name("width", "8")
    ('fedavg', 'lr 0.1', 'width 8')
    """
    plain = "." not in axis and not label.replace(".", "").isdigit()
    return label if plain else f"{axis.rpartition('.')[2]} {label}"


def means(curves: Iterable[Curve]) -> dict[int, tuple[float, float | None, int]]:
    """round -> mean, sample standard deviation (None of one run), runs that have the round."""
    by_round: dict[int, list[float]] = {}
    for curve in curves:
        for t, value in curve.items():
            by_round.setdefault(t, []).append(value)
    return {t: (fmean(v), stdev(v) if len(v) > 1 else None, len(v)) for t, v in sorted(by_round.items())}


def mean_curve(curves: Iterable[Curve]) -> Curve:
    return {t: mean for t, (mean, _, _) in means(curves).items()}


def by_group(
    runs: Runs, name: str, title: str, y_label: str, curves: Mapping[Path, Curve], column: str = "", note: str = ""
) -> Figure | None:
    """Draw one line for each group of runs: the curve of a single run, or the mean of several with a band around it.

    Args:
        curves: the values by round of each run, by the path of its directory. Without any value the result is None.
    """
    series, data = list[Series](), list[list[Value]]()
    least, most = (0.0, 100.0) if y_label.endswith("(%)") else (-inf, inf)  # a band ends where no value can be
    for group in runs.groups:
        by_round = means(curves[run.path] for run in group.runs)
        if by_round:
            band = [(max(m - (s or 0.0), least), min(m + (s or 0.0), most)) for m, s, _ in by_round.values()]
            low, high = zip(*band, strict=True) if len(group.runs) > 1 else ((), ())
            series.append(Series(group.name, list(by_round), [m for m, _, _ in by_round.values()], low, high))
            data += [[group.name, t, *facts] for t, facts in by_round.items()]
    head = ("settings", "round", column or name, "std", "runs")
    return Figure(name, title, Lines(series, "round", y_label), head, data, note) if series else None


def by_name(
    name: str, title: str, y_label: str, curves: Mapping[str, Curve], head: Sequence[str] = (), note: str = "",
    from_zero: bool = False,
) -> Figure | None:  # fmt: skip
    """Draw a line for each curve, over the rounds that any has; None without any. head: of the table's columns."""
    rounds = sorted({t for each in curves.values() for t in each})
    series = [Series(label, rounds, [each.get(t) for t in rounds]) for label, each in curves.items() if each]
    data: list[list[Value]] = [[t, *(each.get(t) for each in curves.values())] for t in rounds]
    chart = Lines(series, "round", y_label, from_zero=from_zero)
    return Figure(name, title, chart, ("round", *(head or curves)), data, note) if series else None
