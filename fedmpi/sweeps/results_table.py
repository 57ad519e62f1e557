"""`fedmpi table`: mean and standard deviation over seeds of every cell of a sweep, beside published values.

A cell is the mean over seeds of one metric of summary.json, or of analysis.jsonl (losses.shift), +- the sample standard
deviation (n - 1). Differences are paired: the mean of (row - first row) over the seeds that both rows have, +- its
standard error s / sqrt(n). A `*` marks differences whose 95 % interval, by Student's t with n - 1 degrees of freedom,
does not contain 0; it is not corrected for the number of cells. docs/campaigns.md explains the signs beside published
values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from fedmpi.common.errors import UserError
from fedmpi.common.text import choose_main_metric, is_lower_better, pluralize, suggest_name
from fedmpi.config import Settings
from fedmpi.runtime.inspection import compare
from fedmpi.sweeps import progress
from fedmpi.sweeps.axes import SEED, SUMMARY_PARTS, Axis, PublishedResults
from fedmpi.sweeps.expand import Sweep

CellKey = tuple[str, ...]  # a label of each axis except seed
FinishedRun = tuple[dict[str, str], Settings, progress.RunState]  # labels, settings and state of a run that is done


@dataclass
class Cell:
    """One cell of the table: the results of runs that differ only in their seed.

    Attributes:
        asked: the seeds of the sweep; [""] if the sweep has no axis seed.
        values: seed -> metric, for runs that are done and whose metric is a finite number.
        bad: seeds of runs that are done and whose metric is not finite.
        published: mean and standard deviation of a publication.
    """

    seeds: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    non_finite_seeds: list[str] = field(default_factory=list)
    published: tuple[float, float] | None = None

    @property
    def mean(self) -> float:
        return fmean(self.values.values()) if self.values else math.nan

    @property
    def std(self) -> float:
        """The sample standard deviation over seeds; nan for fewer than two seeds."""
        return stdev(self.values.values()) if len(self.values) > 1 else math.nan

    @property
    def missing_seeds(self) -> list[str]:
        """The seeds whose run is not done."""
        done = {*self.values, *self.non_finite_seeds}
        return [seed for seed in self.seeds if (seed not in done if seed else not done)]


@dataclass(frozen=True)
class ResultsTable:
    """All cells of the table of a sweep, for one metric.

    Attributes:
        of: the part of summary.json from which the metric is taken, such as last or best.
        axes: all axes except seed, beginning with the axis of the rows.
        cells: the label of each axis -> the cell.
        options: options of the command that makes the table.
        source: the source of the published values.
        lower_is_better: whether lower values of the metric are better.
        notes: remarks on the metric and on differences between the runs.
    """

    sweep: Sweep
    metric: str
    summary_part: str
    axes: tuple[Axis, ...]
    cells: dict[CellKey, Cell]
    command_options: tuple[str, ...] = ()
    source: str | None = None
    lower_is_better: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> list[CellKey]:
        return list(dict.fromkeys(key[:1] for key in self.cells))

    @property
    def columns(self) -> list[CellKey]:
        return list(dict.fromkeys(key[1:] for key in self.cells))

    @property
    def num_seeds(self) -> int:
        return len({seed for cell in self.cells.values() for seed in cell.seeds})

    @property
    def decimals(self) -> int:
        """The number of decimals in the table: 2, or as many as the largest value needs for three digits."""
        most = max((abs(v) for cell in self.cells.values() for v in cell.values.values()), default=0.0)
        return 2 if most >= 2 else 3 if most >= 0.1 or not most else 2 - math.floor(math.log10(most))

    def column_heading(self, column: CellKey) -> str:
        """Return the heading of a column, such as `alpha 0.1 MNIST`."""
        named = zip(self.axes[1:], column, strict=True)
        each = [f"{axis.name.rpartition('.')[2]} {label}" if axis.is_key else label for axis, label in named]
        return " ".join(each) or self.metric


def collect_results(sweep: Sweep, metric: str | None, of: str | None, rows: str | None = None) -> ResultsTable:
    """Collect one metric of all runs of a sweep that are done.

    Args:
        metric: the metric; None: the first published metric, or the main metric of the runs if nothing is published.
        of: the part of summary.json; None: that of the published metric, or last.
        rows: the axis whose labels are the rows; None: the first axis.

    Raises:
        UserError: if no run is done, none has the metric, or runs were made with different plug-ins or data.
    """
    given = {"--metric": metric, "--round": of, "--rows": rows}
    options = [word for name, value in given.items() if value for word in (name, value)]
    metric, of, published = _choose_metric(sweep, metric, of)
    axes = [axis for axis in sweep.axes if axis.name != SEED]
    names = [axis.name for axis in axes]
    if rows is not None and rows not in names:
        raise UserError(f"--rows: unknown axis '{rows}'; {suggest_name(rows, names)}")
    axes.sort(key=lambda axis: rows is not None and axis.name != rows)
    done = _find_finished_runs(sweep)
    lower_is_better = {name for *_, state in done for name in state.summary.get("lower_is_better", ())}
    if metric is not None and progress.is_diagnostic(metric):
        done = [
            (labels, run, replace(state, summary=progress.summarize_diagnostics(run))) for labels, run, state in done
        ]
    known = [state.summary.get(of, {}) for *_, state in done]
    protocols = dict.fromkeys(name for _, run, _ in done for name in run.evaluate.protocol if name != "global")
    name = _most_common_name(known, metric, list(protocols))
    cells: dict[CellKey, Cell] = {}
    for labels in sweep.labels:
        cell = cells.setdefault(tuple(labels[axis.name] for axis in axes), Cell())
        cell.seeds.append(labels.get(SEED, ""))
        cell.published = published.find_cell(labels) if published else None
    for labels, run, state in done:
        cell = cells[tuple(labels[axis.name] for axis in axes)]
        seed, value = labels.get(SEED, str(run.seed)), state.get_metric(of, name)
        if math.isfinite(value):
            cell.values[seed] = value
        else:
            cell.non_finite_seeds.append(seed)
    if not any(cell.values for cell in cells.values()):
        raise UserError(
            f"--metric: no run has a figure '{name}'; {suggest_name(name, {n for each in known for n in each})}"
        )
    notes = _check_comparability(sweep, [run for _, run, _ in done])
    if metric is not None and name != metric:
        notes.insert(0, f"{name} is compared, as most runs have no {metric}")
    source = published.source or "published" if published else None
    less = is_lower_better(name, lower_is_better)
    return ResultsTable(sweep, name, of, tuple(axes), cells, tuple(options), source, less, tuple(notes))


def _find_finished_runs(sweep: Sweep) -> list[FinishedRun]:
    runs = []
    for labels, settings in sweep.final_runs():
        if settings is not None and (state := progress.read_state(settings)).status == progress.DONE:
            runs.append((labels, settings, state))
    if not runs:
        raise UserError(f"none of {pluralize(len(sweep.labels), 'run')} is done; {sweep.command}")
    return runs


def _choose_metric(sweep: Sweep, metric: str | None, of: str | None) -> tuple[str | None, str, PublishedResults | None]:
    """Return the metric that was requested or published, its part of summary.json, and the published values."""
    candidates = [each for each in sweep.published if metric in (None, each.metric_key[1])]
    published = next((each for each in candidates if of in (None, each.metric_key[0])), None)
    # A published metric without a round is compared with any round.
    published = published or next((each for each in candidates if each.metric == each.metric_key[1]), None)
    if first := published or next(iter(candidates), None):
        of, metric = of or first.metric_key[0], first.metric_key[1]
    of = of or "last"
    is_diagnostic = metric is not None and progress.is_diagnostic(metric)
    allowed = ("last", "mean_last_10") if is_diagnostic else SUMMARY_PARTS  # diagnostics have no best value
    if of not in allowed:
        raise UserError(f"--round: {of}; allowed: {', '.join(allowed)}")
    return metric, of, published


def _most_common_name(known: Sequence[Mapping[str, Any]], metric: str | None, protocols: Sequence[str]) -> str:
    """Return the name of a metric in the evaluation protocol that most runs have, such as personal_accuracy.

    `known` are the metrics of each run; without `metric`, the main metric of the first run is used.
    """
    if metric is None:
        metric = choose_main_metric(known[0]) or ""
        prefix = next((f"{name}_" for name in protocols if metric.startswith(f"{name}_")), "")
        metric = metric.removeprefix(prefix)
    names = [metric, *(f"{protocol}_{metric}" for protocol in protocols)]
    return max(names, key=lambda name: sum(name in each for each in known))


def _check_comparability(sweep: Sweep, shown: Sequence[Settings]) -> list[str]:
    """Check that runs were made with the same data and plug-ins, and return notes on different versions of the code.

    Raises:
        UserError: if data or plug-ins differ, so that a mean over the runs has no meaning, and the runs do not have
            checkpoint.changes=accept.
    """
    runs = {settings.name: settings for settings in shown}
    if sweep.tuning is not None:  # the tuning runs must match, too
        runs |= {settings.name: settings for _, settings in sweep.first_stage_runs()}
    identities = [
        (settings, known) for settings in runs.values() if (known := progress.read_identity(settings)) is not None
    ]
    notes, accepted = list[str](), all(settings.checkpoint.changes == "accept" for settings in runs.values())
    for item, (first, other) in compare.find_digest_differences(identities).items():
        mismatch = f"{first} and {other} differ in {item[1:-1]}"
        if item not in compare.CODE_DIGESTS and not accepted:
            raise UserError(
                f"{progress.run_directory(identities[0][0]).parent}: {mismatch}, and a mean would be over both. Move "
                "those with the old one away and let `fedmpi sweep` train them again, leave some out (only, "
                "exclude), or put them together all the same with checkpoint.changes=accept"
            )
        notes.append(f"mixed: {mismatch}")
    return notes


def compare_with_published(cell: Cell, decimals: int) -> str:
    """Compare our mean with the published one, in units of the published standard deviation.

    If none is published, or it is 0, our standard deviation is used.

    Args:
        decimals: number of decimals in the table. Without a published standard deviation, means that agree to this
            number of decimals are equal.

    Returns:
        "=" within one standard deviation, "~" within two, "!" outside, "?" if neither is known, "" without values.
    """
    if cell.published is None or not cell.values:
        return ""
    mean, std = cell.published
    distance = abs(cell.mean - mean)
    if not std > 0 and distance < 0.5 * 10**-decimals:
        return "="
    spread = std if std > 0 else cell.std
    if math.isnan(spread) or not spread:
        return "?" if math.isnan(std) else "!"
    return "=" if distance <= spread else "~" if distance <= 2 * spread else "!"


def paired_difference(cells: ResultsTable, key: CellKey) -> tuple[float, float, str] | None:
    """Return the paired difference over seeds between a cell and the cell of the first row in the same column.

    Returns:
        The mean difference over the seeds that both cells have, its standard error, and a verdict: "better" or "worse"
        ("higher" or "lower" for diagnostics of `analysis`) if 0 lies outside the 95 % interval, otherwise "". None for
        the first row, and if the cells have fewer than two seeds in common.
    """
    first, other = (cells.cells.get(each) for each in ((*cells.rows[0], *key[1:]), key))
    if first is None or other is None or first is other:
        return None
    paired = [value - first.values[seed] for seed, value in other.values.items() if seed in first.values]
    if len(paired) < 2:
        return None
    mean, error = fmean(paired), stdev(paired) / math.sqrt(len(paired))
    if not error or abs(mean) <= stdtrit(len(paired) - 1, 0.975) * error:  # equal differences give no error
        return mean, error, ""
    if progress.is_diagnostic(cells.metric):
        return mean, error, "lower" if mean < 0 else "higher"
    return mean, error, "better" if (mean < 0) == cells.lower_is_better else "worse"
