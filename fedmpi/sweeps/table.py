"""`fedmpi table`: mean and standard deviation over seeds of every cell of a sweep, beside what others report.

The rows are the first axis but `seed`, the columns all labels of the others. A cell is the mean over seeds of one
metric of summary.json, +- the sample standard deviation (n - 1). Where most runs have no accuracy of a global model,
that of another protocol of evaluate.protocol is shown under its own name: personal_accuracy. A difference is paired:
the mean over seeds that both rows have of (row - first row), +- its standard error s / sqrt(n); `*` where 0 lies
outside its 95 % interval by Student's t with n - 1 degrees of freedom, not corrected for the number of cells. Beside a
published value: `=` within its standard deviation, `~` within two, `!` beyond (in ours where it has none, or 0; `?`:
nobody has). losses.shift and the like are what `analysis` has measured (analysis.jsonl).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtrit

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, lower_is_better, main_metric, nearest
from fedmpi.config import Settings
from fedmpi.runtime.reading import digests
from fedmpi.sweeps import progress
from fedmpi.sweeps.axes import SEED, Axis
from fedmpi.sweeps.expand import Sweep
from fedmpi.sweeps.reference_results import OF, Published

Key = tuple[str, ...]  # a label of each axis but seed


class Statistics(NamedTuple):
    """Statistics over the seeds of a cell; nan where there are too few seeds."""

    mean: float
    std: float  # sample standard deviation
    seeds: int  # that have a value
    asked: int  # that the cell is to have


class DoneRun(NamedTuple):
    """A run that is done, with its place in the table."""

    cell: Key
    seed: str
    settings: Settings
    state: progress.State


@dataclass(frozen=True)
class Cells:
    """The results of a sweep's runs.

    Attributes:
        axes: all but seed, the rows' first.
        values: cell -> seed -> metric, of runs that are done and whose metric is a number.
        bad: cell -> seeds whose metric is not a number.
        options: of the command that makes the table.
        published: what others report of this metric.
        falling: whether less of the metric is better.
        notes: remarks on the metric, and on what the runs do not have in common.
    """

    sweep: Sweep
    metric: str
    of: str
    axes: tuple[Axis, ...]
    values: dict[Key, dict[str, float]]
    bad: dict[Key, list[str]]
    options: tuple[str, ...] = ()
    published: Published | None = None
    falling: bool = False
    notes: tuple[str, ...] = ()

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys(self.key(labels) for labels in self.sweep.labels))

    @property
    def rows(self) -> list[Key]:
        return list(dict.fromkeys(key[:1] for key in self.keys))

    @property
    def columns(self) -> list[Key]:
        return list(dict.fromkeys(key[1:] for key in self.keys))

    @property
    def seeds(self) -> int:
        return len({labels.get(SEED, "") for labels in self.sweep.labels})

    def key(self, labels: Mapping[str, str]) -> Key:
        return tuple(labels[axis.name] for axis in self.axes)

    def seeds_of(self, key: Key) -> list[str]:
        """Return the seeds that the sweep asks for in a cell."""
        return [labels.get(SEED, "") for labels in self.sweep.labels if self.key(labels) == key]

    def statistics(self, key: Key) -> Statistics:
        values = list(self.values.get(key, {}).values())
        mean, std = fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan
        return Statistics(mean, std, len(values), len(self.seeds_of(key)))

    def published_value(self, key: Key) -> tuple[float, float] | None:
        """Return the published mean and standard deviation of a cell."""
        if self.published is None:
            return None
        labels = dict(zip((axis.name for axis in self.axes), key, strict=True))
        return self.published.values.get(tuple(labels.get(name, "") for name in self.published.axes))


def collect(sweep: Sweep, metric: str | None, of: str | None, rows: str | None = None) -> Cells:
    """Collect one metric of the runs that are done.

    Args:
        metric, of: the metric and the round; default: those of the first published metric, else the last accuracy.
        rows: the axis whose labels are the rows; default: the first.

    Raises:
        UserError: no run is done, none has the metric, or they were made with different plug-ins or data.
    """
    given = {"--metric": metric, "--of": of, "--rows": rows}
    options = [word for name, value in given.items() if value for word in (name, value)]
    metric, of, published = _choose_metric(sweep, metric, of)
    axes = [axis for axis in sweep.axes if axis.name != SEED]
    names = [axis.name for axis in axes]
    if rows is not None:
        if rows not in names:
            raise UserError(f"--rows: unknown axis '{rows}'; {nearest(rows, names)}")
        axes.sort(key=lambda axis: axis.name != rows)
    runs = _done_runs(sweep, axes)
    falling = {name for run in runs for name in run.state.summary.get("falling", ())}
    if metric is not None and progress.is_diagnostic(metric):
        runs = [run._replace(state=replace(run.state, summary=progress.diagnostics(run.settings))) for run in runs]
    name = _name_in_most(runs, metric, of)
    values: dict[Key, dict[str, float]] = {}
    bad: dict[Key, list[str]] = {}
    for run in runs:
        value = run.state.figure(of, name)
        if math.isfinite(value):
            values.setdefault(run.cell, {})[run.seed] = value
        else:
            bad.setdefault(run.cell, []).append(run.seed)
    if not values:
        known = {each for run in runs for each in run.state.summary.get(of, {})}
        raise UserError(f"--metric: no run has a figure '{name}'; {nearest(name, known)}")
    notes = _comparability_notes(sweep, [run.settings for run in runs])
    if metric is not None and name != metric:
        notes.insert(0, f"{name} is compared, as no model of most runs has {metric}")
    less = lower_is_better(name, falling)
    return Cells(sweep, name, of, tuple(axes), values, bad, tuple(options), published, less, tuple(notes))


def _choose_metric(sweep: Sweep, metric: str | None, of: str | None) -> tuple[str | None, str, Published | None]:
    """Return the metric that is asked for or published, its part of summary.json, and the published values."""
    candidates = [each for each in sweep.published if metric in (None, each.figure[1])]
    published = next((each for each in candidates if of in (None, each.figure[0])), None)
    # What is published without saying of which round is compared with any.
    published = published or next((each for each in candidates if each.metric == each.figure[1]), None)
    if first := published or next(iter(candidates), None):
        of, metric = of or first.figure[0], first.figure[1]
    of = of or "last"
    allowed = progress.DIAGNOSTICS_OF if metric is not None and progress.is_diagnostic(metric) else OF
    if of not in allowed:
        raise UserError(f"--of: {of}; allowed: {', '.join(allowed)}")
    return metric, of, published


def _done_runs(sweep: Sweep, axes: Sequence[Axis]) -> list[DoneRun]:
    runs = []
    for labels, settings in sweep.final_runs():
        if settings is not None and (state := progress.read_state(settings)).what == progress.DONE:
            cell = tuple(labels[axis.name] for axis in axes)
            runs.append(DoneRun(cell, labels.get(SEED, str(settings.seed)), settings, state))
    if not runs:
        raise UserError(f"none of {count(len(sweep.labels), 'run')} is done; {sweep.command}")
    return runs


def _name_in_most(runs: Sequence[DoneRun], metric: str | None, of: str) -> str:
    """Return the metric, or its name in another protocol of evaluation (personal_accuracy) that more runs have."""
    prefixes = {f"{name}_": None for run in runs for name in run.settings.evaluate.protocol if name != "global"}
    if metric is None:
        metric = main_metric(runs[0].state.summary.get(of, {})) or ""
        metric = next((metric.removeprefix(prefix) for prefix in prefixes if metric.startswith(prefix)), metric)
    names = [metric, *(f"{prefix}{metric}" for prefix in prefixes)]
    return max(names, key=lambda name: sum(name in run.state.summary.get(of, {}) for run in runs))


def _comparability_notes(sweep: Sweep, shown: Sequence[Settings]) -> list[str]:
    """Return notes on runs that were not made with one version of the code.

    Raises:
        UserError: they were made with other data or plug-ins, so that a mean would be over two things, and
            checkpoint.changes=accept does not allow it.
    """
    runs = {settings.name: settings for settings in shown}
    if sweep.best is not None:  # those by which was chosen count, too
        runs |= {settings.name: settings for _, settings in sweep.runs()}
    identities = [(settings, known) for settings in runs.values() if (known := progress.identity(settings)) is not None]
    notes, accepted = list[str](), all(settings.checkpoint.changes == "accept" for settings in runs.values())
    for item, (first, other) in digests.differences(identities).items():
        mismatch = f"{first} and {other} differ in {item[1:-1]}"
        if item not in (digests.CODE, digests.TORCH) and not accepted:
            raise UserError(
                f"{progress.directory(identities[0][0]).parent}: {mismatch}, and a mean would be over both. Move "
                "those with the old one away and let `fedmpi sweep` train them again, leave some out (only, "
                "leave_out), or put them together all the same with checkpoint.changes=accept"
            )
        notes.append(f"mixed: {mismatch}")
    return notes


def decimals(cells: Cells) -> int:
    """Return how many decimals are shown: enough for three digits of the largest value if that is small."""
    most = max((abs(v) for each in cells.values.values() for v in each.values()), default=0.0)
    return 2 if most >= 2 else 3 if most >= 0.1 or not most else 2 - math.floor(math.log10(most))


def verdict(cells: Cells, key: Key, theirs: tuple[float, float]) -> str:
    """Judge the distance from the published value in published standard deviations, or in ours where there is none."""
    mean, std, seeds, _ = cells.statistics(key)
    if not seeds:
        return ""
    if not theirs[1] > 0 and abs(mean - theirs[0]) < 0.5 * 10 ** -decimals(cells):  # they read the same
        return "="
    spread = theirs[1] if theirs[1] > 0 else std
    if math.isnan(spread) or not spread:
        return "?" if math.isnan(theirs[1]) else "!"
    distance = abs(mean - theirs[0]) / spread
    return "=" if distance <= 1 else "~" if distance <= 2 else "!"


def difference(cells: Cells, row: Key, column: Key) -> tuple[float, float, str] | None:
    """Compare a cell with that of the first row, seed by seed.

    Returns:
        The mean difference over the seeds that both cells have, its standard error, and a verdict: "better" or "worse"
        ("higher" or "lower" for diagnostics of `analysis`) if 0 lies outside the 95 % interval, else "". None if the
        cells have fewer than two seeds in common.
    """
    first, other = (cells.values.get((*each, *column), {}) for each in (cells.rows[0], row))
    paired = [other[seed] - first[seed] for seed in other if seed in first]
    if len(paired) < 2:
        return None
    mean, error = fmean(paired), stdev(paired) / math.sqrt(len(paired))
    if not error or abs(mean) <= stdtrit(len(paired) - 1, 0.975) * error:  # equal differences say nothing of chance
        return mean, error, ""
    if progress.is_diagnostic(cells.metric):
        return mean, error, "lower" if mean < 0 else "higher"
    return mean, error, "better" if (mean < 0) == cells.falling else "worse"
