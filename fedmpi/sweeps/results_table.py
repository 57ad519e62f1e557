"""Collect the results of a sweep in a table, and compare them with published values (`fedmpi table`).

A cell shows one metric, from summary.json or (for diagnostics such as losses.shift) from analysis.jsonl: its mean over
seeds ± the sample standard deviation (n - 1). Differences are paired: the mean of (row - first row) over the seeds that
both rows have, ± its standard error s / sqrt(n). A `*` marks a difference whose 95 % confidence interval (Student's t,
n - 1 degrees of freedom) does not contain 0; the interval is not corrected for the number of cells. docs/campaigns.md
explains the signs next to published values.
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
FinishedRun = tuple[dict[str, str], Settings, progress.RunState]  # labels, settings and state of a finished run


@dataclass
class TableCell:
    """One cell of the table: the results of runs that differ only in their seeds.

    Attributes:
        seeds: the seeds of the runs in this cell; [""] if the sweep has no axis `seed`.
        values: dict from seed to metric, for finished runs with a finite value of the metric.
        non_finite_seeds: the seeds of finished runs without a finite value of the metric.
        published: the published mean and standard deviation.
    """

    seeds: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    non_finite_seeds: list[str] = field(default_factory=list)
    published: tuple[float, float] | None = None

    @property
    def mean(self) -> float:
        """The mean over seeds; nan if there are no values."""
        return fmean(self.values.values()) if self.values else math.nan

    @property
    def std(self) -> float:
        """The sample standard deviation over seeds; nan for fewer than two seeds."""
        return stdev(self.values.values()) if len(self.values) > 1 else math.nan

    @property
    def missing_seeds(self) -> list[str]:
        """The seeds of runs that are not finished."""
        finished = {*self.values, *self.non_finite_seeds}
        return [seed for seed in self.seeds if (seed not in finished if seed else not finished)]


@dataclass(frozen=True)
class ResultsTable:
    """The results of a sweep for one metric.

    Attributes:
        summary_part: the section of summary.json from which the metric is taken, such as last or best.
        axes: all axes except `seed`; the first one defines the rows, the others define the columns.
        cells: dict from a tuple of labels, one for each of `axes`, to the cell with these labels.
        command_options: the options with which `fedmpi table` creates this table.
        source: the publication that contains the published values; None if there are no such values.
        lower_is_better: whether lower values of the metric are better.
        notes: remarks on the metric and on differences between the runs.
    """

    sweep: Sweep
    metric: str
    summary_part: str
    axes: tuple[Axis, ...]
    cells: dict[CellKey, TableCell]
    command_options: tuple[str, ...] = ()
    source: str | None = None
    lower_is_better: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> list[CellKey]:
        """The labels of the rows, without duplicates."""
        return list(dict.fromkeys(key[:1] for key in self.cells))

    @property
    def columns(self) -> list[CellKey]:
        """The labels of the columns, without duplicates."""
        return list(dict.fromkeys(key[1:] for key in self.cells))

    @property
    def num_seeds(self) -> int:
        """The number of different seeds."""
        return len({seed for cell in self.cells.values() for seed in cell.seeds})

    @property
    def decimals(self) -> int:
        """The number of decimals in the table: at least 2, and enough for 3 significant digits of the largest value."""
        most = max((abs(v) for cell in self.cells.values() for v in cell.values.values()), default=0.0)
        return 2 if most >= 2 else 3 if most >= 0.1 or not most else 2 - math.floor(math.log10(most))

    def format_column_heading(self, column: CellKey) -> str:
        """Return the heading of a column, such as `alpha 0.1 MNIST`."""
        named = zip(self.axes[1:], column, strict=True)
        each = [f"{axis.name.rpartition('.')[2]} {label}" if axis.is_key else label for axis, label in named]
        return " ".join(each) or self.metric


def collect_results(
    sweep: Sweep, metric: str | None, summary_part: str | None, rows: str | None = None
) -> ResultsTable:
    """Collect one metric of all finished runs of a sweep.

    Args:
        metric: the metric to collect; None: the first metric in the section `published` of the sweep file or, without
            this section, the main metric of the runs.
        summary_part: the section of summary.json; None: that of the published metric or, if there is none, "last".
        rows: the axis whose labels form the rows; None: the first axis.

    Raises:
        UserError: if no run has finished, no run has the metric, or the runs used different plug-ins or data.
    """
    arguments = {"--metric": metric, "--round": summary_part, "--rows": rows}
    options = [word for name, value in arguments.items() if value for word in (name, value)]
    metric, summary_part, published = _choose_metric(sweep, metric, summary_part)
    axes = [axis for axis in sweep.axes if axis.name != SEED]
    names = [axis.name for axis in axes]
    if rows is not None and rows not in names:
        raise UserError(f"--rows: unknown axis '{rows}'; {suggest_name(rows, names)}")
    axes.sort(key=lambda axis: rows is not None and axis.name != rows)
    finished = _find_finished_runs(sweep)
    metrics_to_minimize = {name for *_, state in finished for name in state.summary.get("lower_is_better", ())}
    if metric is not None and progress.is_diagnostic(metric):
        finished = [
            (labels, run, replace(state, summary=progress.summarize_diagnostics(run)))
            for labels, run, state in finished
        ]
    metrics_of_runs = [state.summary.get(summary_part, {}) for *_, state in finished]
    protocols = dict.fromkeys(name for _, run, _ in finished for name in run.evaluate.protocol if name != "global")
    name = _find_most_common_name(metrics_of_runs, metric, list(protocols))
    cells: dict[CellKey, TableCell] = {}
    for labels in sweep.labels:
        cell = cells.setdefault(tuple(labels[axis.name] for axis in axes), TableCell())
        cell.seeds.append(labels.get(SEED, ""))
        cell.published = published.find_cell(labels) if published else None
    for labels, run, state in finished:
        cell = cells[tuple(labels[axis.name] for axis in axes)]
        seed, value = labels.get(SEED, str(run.seed)), state.get_metric(summary_part, name)
        if math.isfinite(value):
            cell.values[seed] = value
        else:
            cell.non_finite_seeds.append(seed)
    if not any(cell.values for cell in cells.values()):
        names_in_runs = {n for each in metrics_of_runs for n in each}
        raise UserError(f"--metric: no run has a metric '{name}'; {suggest_name(name, names_in_runs)}")
    notes = _check_comparability(sweep, [run for _, run, _ in finished])
    if metric is not None and name != metric:
        notes.insert(0, f"{name} is compared, because most runs have no {metric}")
    source = published.source or "published" if published else None
    lower_is_better = is_lower_better(name, metrics_to_minimize)
    return ResultsTable(
        sweep, name, summary_part, tuple(axes), cells, tuple(options), source, lower_is_better, tuple(notes)
    )


def _find_finished_runs(sweep: Sweep) -> list[FinishedRun]:
    """Return the finished runs whose results are reported; raise UserError if there are none."""
    runs = []
    for labels, settings in sweep.final_runs():
        if settings is not None and (state := progress.read_state(settings)).status == progress.DONE:
            runs.append((labels, settings, state))
    if not runs:
        raise UserError(f"none of {pluralize(len(sweep.labels), 'run')} is finished; to train them: {sweep.command}")
    return runs


def _choose_metric(
    sweep: Sweep, metric: str | None, summary_part: str | None
) -> tuple[str | None, str, PublishedResults | None]:
    """Choose the metric, its section of summary.json, and the published values to compare it with.

    Args:
        metric: the metric that the user requested; None: not specified.
        summary_part: the section that the user requested; None: not specified.
    """
    candidates = [each for each in sweep.published if metric in (None, each.metric_key[1])]
    published = next((each for each in candidates if summary_part in (None, each.metric_key[0])), None)
    # A published metric without a round is compared with any round.
    published = published or next((each for each in candidates if each.metric == each.metric_key[1]), None)
    if first := published or next(iter(candidates), None):
        summary_part, metric = summary_part or first.metric_key[0], first.metric_key[1]
    summary_part = summary_part or "last"
    is_diagnostic = metric is not None and progress.is_diagnostic(metric)
    allowed = ("last", "mean_last_10") if is_diagnostic else SUMMARY_PARTS  # diagnostics have no best value
    if summary_part not in allowed:
        raise UserError(f"--round: {summary_part} is not allowed; must be {' or '.join(allowed)}")
    return metric, summary_part, published


def _find_most_common_name(
    metrics_of_runs: Sequence[Mapping[str, Any]], metric: str | None, protocols: Sequence[str]
) -> str:
    """Return the name, with or without the prefix of an evaluation protocol, that a metric has in most runs.

    For example, the metric "accuracy" may be recorded as "personal_accuracy".

    Args:
        metric: the metric without a prefix; None: the main metric of the first run.
        protocols: the evaluation protocols of the runs, except `global`.
    """
    if metric is None:
        metric = choose_main_metric(metrics_of_runs[0]) or ""
        prefix = next((f"{name}_" for name in protocols if metric.startswith(f"{name}_")), "")
        metric = metric.removeprefix(prefix)
    names = [metric, *(f"{protocol}_{metric}" for protocol in protocols)]
    return max(names, key=lambda name: sum(name in each for each in metrics_of_runs))


def _check_comparability(sweep: Sweep, runs_shown: Sequence[Settings]) -> list[str]:
    """Check that all runs used the same data and plug-ins, and return notes on different versions of the code.

    Raises:
        UserError: if data or plug-ins differ, because a mean over such runs would be meaningless. With
            checkpoint.changes=accept in all runs, no error is raised.
    """
    runs = {settings.name: settings for settings in runs_shown}
    if sweep.tuning is not None:  # the tuning runs must match, too
        runs |= {settings.name: settings for _, settings in sweep.first_stage_runs()}
    identities = [
        (settings, identity) for settings in runs.values() if (identity := progress.read_identity(settings)) is not None
    ]
    notes, accepted = list[str](), all(settings.checkpoint.changes == "accept" for settings in runs.values())
    for digest, (first, other) in compare.find_digest_differences(identities).items():
        mismatch = f"{first} and {other} differ in {digest[1:-1]}"
        if digest not in compare.CODE_DIGESTS and not accepted:
            place = progress.get_run_directory(identities[0][0]).parent
            raise UserError(
                f"{place}: {mismatch}, so their mean would be meaningless; move the outdated runs away and let "
                "`fedmpi sweep` train them again, select runs with include or exclude, or average them nevertheless "
                "with checkpoint.changes=accept"
            )
        notes.append(f"mixed: {mismatch}")
    return notes


def compare_with_published(cell: TableCell, decimals: int) -> str:
    """Compare our mean with the published mean, and return the sign that the table shows.

    Args:
        cell: the cell, with the published mean and standard deviation. If no standard deviation is published, or if it
            is 0, our own is used instead.
        decimals: number of decimals in the table. Without a published standard deviation, means that agree to this
            number of decimals count as equal.

    Returns:
        "=" if the means differ by at most one standard deviation, "~" if by at most two, "!" if by more, "?" if no
        standard deviation is known, "" if we have no values.
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


def compute_paired_difference(table: ResultsTable, key: CellKey) -> tuple[float, float, str] | None:
    """Return the paired difference between a cell and the cell of the first row in the same column.

    Returns:
        The mean difference over the seeds that both cells have, its standard error, and a verdict. The verdict is
        "better" or "worse" ("higher" or "lower" for diagnostics) if 0 lies outside the 95 % interval, otherwise "".
        The result is None for the first row, and for cells that share fewer than two seeds.
    """
    reference, cell = (table.cells.get(each) for each in ((*table.rows[0], *key[1:]), key))
    if reference is None or cell is None or reference is cell:
        return None
    paired = [value - reference.values[seed] for seed, value in cell.values.items() if seed in reference.values]
    if len(paired) < 2:
        return None
    mean, error = fmean(paired), stdev(paired) / math.sqrt(len(paired))
    if not error or abs(mean) <= stdtrit(len(paired) - 1, 0.975) * error:  # the error is 0 if all differences are equal
        return mean, error, ""
    if progress.is_diagnostic(table.metric):
        return mean, error, "lower" if mean < 0 else "higher"
    return mean, error, "better" if (mean < 0) == table.lower_is_better else "worse"
