"""The runs that a report is about, and which of them differ in their seeds alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmpi.analysis.pages.run import Run, named
from fedmpi.common.errors import UserError
from fedmpi.runtime.reading import digests
from fedmpi.runtime.reading.files import SWEEP_LIST, json_of, no_run

MARKS = ("config.yaml", "metrics.jsonl", "summary.json")  # a directory that holds one of them is a run's
UNLIKE = ("seed", "name", "output")  # settings in which runs of one group may differ
Labels = dict[str, str]  # axis of a sweep -> label, from sweep.json in the directory around the runs


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone. label: in what they differ from the other groups; "" of a single one.
    again: those with a seed that one of `runs` has, which say nothing new (a sweep under two names)."""

    label: str
    runs: tuple[Run, ...]
    again: tuple[Run, ...] = ()

    def name(self) -> str:
        alone = self.runs[0].name if len(self.runs) == 1 else f"mean of {len(self.runs)} runs"
        return self.label or alone


class Runs:
    """What a report is about: `all` of the runs, and `groups` of them."""

    def __init__(self, every: Sequence[Run]) -> None:
        self.all = tuple(every)
        self.differing = differing(self.all)
        self.groups = grouped(self.all, self.differing)

    def figures(self) -> list[str]:
        """As of one run, of all of them."""
        falls = {name: run.falls(name) for run in self.all for name in run.figures}
        return sorted(falls, key=lambda name: falls[name])

    @property
    def alone(self) -> Run | None:
        """The run, where there is but one."""
        return self.all[0] if len(self.all) == 1 else None

    def label(self, run: Run) -> str:
        """What a run is called among the others."""
        if len({each.name for each in self.all}) == len(self.all):
            return run.name
        return str(run.path)


def differing(runs: Sequence[Run]) -> list[str]:
    """Keys of settings that are not the same in all runs, but `UNLIKE`; behind them digests of code and data, where
    settings that are the same hide a difference."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in UNLIKE)
    found = [key for key in keys if len({_shown(run, key) for run in runs}) > 1]
    for name in dict.fromkeys(name for run in runs for name in run.digests):
        decide = [key for key in found if name.startswith("(plug-in ") or key.startswith(("data.", "init."))]
        if any(len({run.digests.get(name) for run in each} - {None}) > 1 for each in alike(runs, decide).values()):
            found.append(name)
    return found


def alike(runs: Sequence[Run], keys: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(_shown(run, key) for key in keys), []).append(run)
    return found


def grouped(runs: Sequence[Run], keys: Sequence[str]) -> list[Group]:
    """Runs of the same settings, in the order in which they come. The label names as few keys as tell groups apart,
    the method's first; all that differ are in the table of settings. Runs of a sweep are called as it calls them."""
    found = alike(runs, keys)
    needed = list[int]()
    for i in sorted(range(len(keys)), key=lambda i: (keys[i] != "method.name", keys[i].startswith("method."), i)):
        if len({tuple(each[j] for j in (*needed, i)) for each in found}) > len(
            {tuple(each[j] for j in needed) for each in found}
        ):
            needed.append(i)
    once = [_once(members) for members in found.values()]
    labels = _sweep_labels(run.path for run in runs)
    told = _axis_names([[labels[run.path] for run in members] for members, _ in once])
    words = short([keys[i] for i in needed])
    told = told or [_label([(words[keys[i]], each[i]) for i in needed]) for each in found]
    return [Group(label, *members) for label, members in zip(told, once, strict=True)]


def _once(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """(one run a seed, the others): the first of those that went furthest. Data that a user's source draws may differ
    though settings and seed are the same; then so do the runs."""
    first: dict[tuple[object, ...], Run] = {}
    for run in sorted(runs, key=lambda run: (not run.complete, -len(run.rows))):
        drawn = [run.identity.get(key) for key in (digests.PARTITION, digests.DATA, digests.TEST)]
        first.setdefault((run.seed or run.path, *map(str, drawn)), run)
    kept = set(map(id, first.values()))
    return tuple(run for run in runs if id(run) in kept), tuple(run for run in runs if id(run) not in kept)


def _label(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(named(value) if key == "method" else f"{key} {value}" for key, value in pairs)


def short(keys: Sequence[str]) -> dict[str, str]:
    """As much of each key as tells them apart, without its `.name`.

    >>> short(["method.name", "train.optim.name", "server.optim.name", "train.lr"])
    {'method.name': 'method', 'train.optim.name': 'train.optim', 'server.optim.name': 'server.optim', 'train.lr': 'lr'}
    """
    parts = {key: (key[1:-1],) if key.startswith("(") else tuple(key.removesuffix(".name").split(".")) for key in keys}
    found = {}
    for key, own in parts.items():
        alike = [
            n for other, its in parts.items() if other != key for n in range(1, len(own) + 1) if its[-n:] == own[-n:]
        ]
        found[key] = ".".join(own[-min(max(alike, default=0) + 1, len(own)) :])
    return found


def _shown(run: Run, key: str) -> str:
    value = run.config.get(key, run.digests.get(key, "-"))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def read(paths: Sequence[Path]) -> Runs:
    """The runs in directories: of a run itself, or of all that lie in a sweep's.

    Raises:
        UserError: no such directory, or no run in it.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(
                f"{path}: {'is a file' if path.exists() else 'there is no such directory'}; name one that "
                "`fedmpi run` or `fedmpi sweep` has written"
            )
        inside = [path]
        if not is_run(path):
            inside = _in_order(path, [each for each in path.iterdir() if each.is_dir() and is_run(each)])
        if not inside:
            raise no_run(path, f"{', '.join(MARKS)}, and no directory that does")
        found |= {each.resolve(): Run(each) for each in inside}
    return Runs(list(found.values()))


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in MARKS)


def _in_order(place: Path, found: Sequence[Path]) -> list[Path]:
    """Run directories as the sweep's file lists them; what it does not list comes behind."""
    names = (json_of(place / SWEEP_LIST) or {}).get("runs")
    at = {name: i for i, name in enumerate(names) if isinstance(name, str)} if isinstance(names, list) else {}
    return sorted(found, key=lambda path: (at.get(path.name, len(at)), path))


def _sweep_labels(runs: Iterable[Path]) -> dict[Path, Labels]:
    """Each run's, by axis; {} of one that is of no sweep."""
    places = {run: run.resolve() for run in runs}
    told = {
        folder: (json_of(folder / SWEEP_LIST) or {}).get("labels") for folder in {p.parent for p in places.values()}
    }
    return {run: _labels(told[place.parent], place.name) for run, place in places.items()}


def _labels(told: object, name: str) -> Labels:
    found = told.get(name) if isinstance(told, dict) else None
    return {str(axis): str(label) for axis, label in found.items()} if isinstance(found, dict) else {}


def _axis_names(groups: Sequence[Sequence[Labels]]) -> list[str] | None:
    """What tells groups of runs apart by the labels of their axes; None where these do not.

    >>> _axis_names([[{"method": "dyn", "seed": "0"}, {"method": "dyn", "seed": "1"}], [{"method": "avg"}]])
    ['dyn', 'avg']
    >>> _axis_names([[{"method": "avg", "train.lr": "0.1"}], [{"method": "avg", "train.lr": "0.2"}]])
    ['lr 0.1', 'lr 0.2']
    """
    sets = [{tuple((a, b) for a, b in each.items() if a != "seed") for each in group} for group in groups]
    if len(groups) < 2 or any(len(one) != 1 for one in sets):
        return None
    told = [dict(next(iter(one))) for one in sets]
    axes = [axis for axis in told[0] if len({each.get(axis) for each in told}) > 1]
    if any(each.keys() != told[0].keys() for each in told) or not axes:
        return None
    found = [", ".join(_word(axis, each[axis]) for axis in axes) for each in told]
    return found if len(set(found)) == len(found) else None


def _word(axis: str, label: str) -> str:
    return f"{axis.rpartition('.')[2]} {label}" if "." in axis or label.replace(".", "").isdigit() else label
