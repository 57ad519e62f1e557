"""The runs of a report, in groups that differ only by seed, over which means are taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, stdev

from fedmpi.common.errors import UserError
from fedmpi.reports.charts import Lines, Series
from fedmpi.reports.page import Figure, Value
from fedmpi.reports.run_data import Curve, Run, base_name
from fedmpi.runtime.reading import digests
from fedmpi.runtime.reading.files import SWEEP_LIST, json_of, no_run

MARKS = ("config.yaml", "metrics.jsonl", "summary.json")  # a directory that holds one of them is a run's
UNLIKE = ("seed", "name", "output")  # settings in which runs of one group may differ
BAND = "A line with a band is the mean of runs that differ in their seeds alone, and one sample standard deviation."


@dataclass(frozen=True)
class Group:
    """Runs that differ only by seed.

    Attributes:
        name: how the settings differ from those of the other groups.
        duplicates: runs with the seed of one of `runs`, such as those of a renamed sweep; they are in no mean.
    """

    name: str
    runs: tuple[Run, ...]
    duplicates: tuple[Run, ...] = ()


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
        self.differing = [] if self.alone else differing(self.all)
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
            raise UserError(
                f"{path}: {'is a file' if path.exists() else 'there is no such directory'}; name one that "
                "`fedmpi run` or `fedmpi sweep` has written"
            )
        inside = [path]
        if not is_run(path):  # a sweep's: in the order of its list; runs that it does not list come last
            names = (json_of(path / SWEEP_LIST) or {}).get("runs")
            at = {name: i for i, name in enumerate(names) if isinstance(name, str)} if isinstance(names, list) else {}
            inside = [each for each in path.iterdir() if each.is_dir() and is_run(each)]
            inside.sort(key=lambda each: (at.get(each.name, len(at)), each))
        if not inside:
            raise no_run(path, f"{', '.join(MARKS)}, and no directory that does")
        runs |= {each.resolve(): Run(each) for each in inside}
    return Runs(list(runs.values()))


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the keys of settings that differ between runs, without `UNLIKE`, then the digests of code and data that
    differ although the settings are the same."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in UNLIKE)
    result = [key for key in keys if len({shown(run, key) for run in runs}) > 1]
    for name in dict.fromkeys(name for run in runs for name in run.digests):
        decide = [key for key in result if name.startswith("(plug-in ") or key.startswith(("data.", "init."))]
        if any(
            len({run.digests.get(name) for run in each} - {None}) > 1
            for each in group_by_settings(runs, decide).values()
        ):
            result.append(name)
    return result


def shown(run: Run, key: str) -> str:
    value = run.config.get(key, run.digests.get(key, "-"))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def group_by_settings(runs: Sequence[Run], keys: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """Return {values of these settings: the runs that have them}."""
    by_values: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        by_values.setdefault(tuple(shown(run, key) for key in keys), []).append(run)
    return by_values


def make_groups(runs: Sequence[Run], keys: Sequence[str]) -> list[Group]:
    """Group runs of the same settings, in their order.

    A group is named by the labels of its sweep, or by as few settings as distinguish the groups, the method first.
    """
    by_values = group_by_settings(runs, keys)
    needed = list[int]()
    for i in sorted(range(len(keys)), key=lambda i: (keys[i] != "method.name", keys[i].startswith("method."), i)):
        before, after = ({tuple(each[j] for j in chosen) for each in by_values} for chosen in (needed, [*needed, i]))
        if len(after) > len(before):
            needed.append(i)
    once = [without_duplicates(members) for members in by_values.values()]
    names = sweep_names([unique for unique, _ in once])
    if names is None:
        chosen = [keys[i] for i in needed]
        plain = [key.strip("()").removesuffix(".name") for key in chosen]
        last = [full if key[0] == "(" else full.rpartition(".")[2] for key, full in zip(chosen, plain, strict=True)]
        words = [short if last.count(short) == 1 else full for short, full in zip(last, plain, strict=True)]
        pairs = [list(zip(words, (each[i] for i in needed), strict=True)) for each in by_values]
        names = [", ".join(base_name(v) if word == "method" else f"{word} {v}" for word, v in each) for each in pairs]
    means = [unique[0].name if len(unique) == 1 else f"mean of {len(unique)} runs" for unique, _ in once]
    return [Group(name or mean, *members) for name, mean, members in zip(names, means, once, strict=True)]


def without_duplicates(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return (one run for each seed, the others); of several runs the one with most rounds is taken.

    Runs with different data count as different, even if settings and seed are the same.
    """
    first: dict[tuple[object, ...], Run] = {}
    for run in sorted(runs, key=lambda run: (not run.complete, -len(run.rows))):
        drawn = [run.identity.get(key) for key in (digests.PARTITION, digests.DATA, digests.TEST)]
        first.setdefault((run.seed or run.path, *map(str, drawn)), run)
    unique = set(map(id, first.values()))
    return tuple(run for run in runs if id(run) in unique), tuple(run for run in runs if id(run) not in unique)


def sweep_names(groups: Sequence[Sequence[Run]]) -> list[str] | None:
    """Return names of groups by the labels of their sweep; None where these do not distinguish the groups."""
    labels = list[dict[str, str]]()
    for members in groups:
        distinct = set[tuple[tuple[str, str], ...]]()
        for place in (run.path.resolve() for run in members):
            known = (json_of(place.parent / SWEEP_LIST) or {}).get("labels")
            own = known.get(place.name) if isinstance(known, dict) else None
            pairs = own.items() if isinstance(own, dict) else ()
            distinct.add(tuple((str(axis), str(label)) for axis, label in pairs if axis != "seed"))
        labels.append(dict(next(iter(distinct))))
        if len(distinct) > 1 or labels[-1].keys() != labels[0].keys():
            return None
    axes = [axis for axis in labels[0] if len({each[axis] for each in labels}) > 1]
    names = [", ".join(axis_name(axis, each[axis]) for axis in axes) for each in labels]
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
    """A line for each curve, over the rounds that any has; None without any. head: of the table's columns."""
    rounds = sorted({t for each in curves.values() for t in each})
    series = [Series(label, rounds, [each.get(t) for t in rounds]) for label, each in curves.items() if each]
    data: list[list[Value]] = [[t, *(each.get(t) for each in curves.values())] for t in rounds]
    chart = Lines(series, "round", y_label, from_zero=from_zero)
    return Figure(name, title, chart, ("round", *(head or curves)), data, note) if series else None
