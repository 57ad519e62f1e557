"""`fedmpi table`: mean and standard deviation over seeds of every cell of a sweep, beside what others report.

The rows are the first axis but `seed`, the columns all labels of the others. A cell is the mean over seeds of one
figure of summary.json, +- the sample standard deviation (n - 1). Where runs have no accuracy it is that of the first
protocol in evaluate.protocol which all of them have, under its own name: personal_accuracy; a line says which runs have
no other. A difference is paired: the mean over seeds
that both rows have of (row - first row), +- its standard error s / sqrt(n); `*` where 0 lies outside its 95 % interval
by Student's t with n - 1 degrees of freedom: 4.3 standard errors for three seeds, and not corrected for the number of
cells. Beside a published figure: `=` within its standard deviation, `~` within two, `!` beyond (in ours where it has
none, or 0; `?`: nobody has). losses.shift and the like are what `analysis` has measured (analysis.jsonl).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtrit

from fedmpi.common.errors import UserError
from fedmpi.common.formatting import table
from fedmpi.common.text import count, lower_is_better, main_metric, nearest, shorten
from fedmpi.config import Settings
from fedmpi.config.loading import shown
from fedmpi.runtime.reading import digests
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.sweeps import progress
from fedmpi.sweeps.axes import SEED, Axis
from fedmpi.sweeps.expand import Sweep
from fedmpi.sweeps.reference_results import Published

WHAT = {
    "last": "after the last round",
    "mean_last_10": "mean of the last ten evaluations",
    "best": "best round",
    "selected": "after the round that validation rows chose",
}
OF = tuple(WHAT)
MOST_TOLD = 8  # cells with something missing
Key = tuple[str, ...]  # a label of each axis but seed


class Statistics(NamedTuple):
    """Statistics over the seeds of a cell; nan where there are too few seeds."""

    mean: float
    std: float  # sample standard deviation
    seeds: int  # that have a figure
    asked: int  # that the cell is to have


@dataclass(frozen=True)
class Cells:
    """The results of a sweep's runs.

    Attributes:
        values: cell -> seed -> metric, of runs that are done and whose metric is a number.
        bad: cell -> seeds whose metric is not a number.
        chosen: a text on the candidate that was chosen for each cell of `best`.
    """

    sweep: Sweep
    metric: str
    of: str
    axes: tuple[Axis, ...]  # but seed; the rows' first
    values: dict[Key, dict[str, float]]
    bad: dict[Key, list[str]]
    seeds: int  # asked for
    chosen: list[str] = field(default_factory=list)
    options: tuple[str, ...] = ()  # of the command that makes the table
    published: Published | None = None  # what others report of this figure
    falling: bool = False  # less of it is better
    notes: tuple[str, ...] = ()  # which figure is shown in place of the one asked for; what the runs have not in common

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys(self.key(labels) for labels in self.sweep.labels))

    def key(self, labels: Mapping[str, str]) -> Key:
        return tuple(labels[axis.name] for axis in self.axes)

    def asked(self, key: Key) -> list[str]:
        """Return the seeds that the sweep asks for in a cell."""
        return [labels.get(SEED, "") for labels in self.sweep.labels if self.key(labels) == key]

    def statistics(self, key: Key) -> Statistics:
        values = list(self.values.get(key, {}).values())
        mean, std = fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan
        return Statistics(mean, std, len(values), len(self.asked(key)))


def collect(sweep: Sweep, metric: str | None, of: str | None, rows: str | None = None) -> Cells:
    """Collect one metric of the runs that are done.

    Args:
        metric, of: the metric and the round; default: those of the first published metric, else the last accuracy.
        rows: the axis whose labels are the rows; default: the first.

    Raises:
        UserError: no run is done, none has the metric, or they were made with different plug-ins or data.
    """
    options = [*(["--metric", metric] if metric else []), *(["--of", of] if of else [])]
    metric, of, published = _choose_metric(sweep, metric, of)
    probed = metric is not None and progress.is_diagnostic(metric)
    axes = tuple(axis for axis in sweep.axes if axis.name != SEED)
    names = [axis.name for axis in axes]
    if rows is not None:
        if rows not in names:
            raise UserError(f"--rows: unknown axis '{rows}'; {nearest(rows, names)}")
        axes = tuple(sorted(axes, key=lambda axis: axis.name != rows))
        options += ["--rows", rows]
    values: dict[Key, dict[str, float]] = {}
    bad: dict[Key, list[str]] = {}
    known, falling, done = dict[str, None](), set[str](), list[tuple[Key, str, Settings, progress.State]]()
    for labels, settings in sweep.final_runs():
        state = progress.read_state(settings) if settings else None
        if settings is None or state is None or state.what != progress.DONE:
            continue
        falling.update(state.summary.get("falling", ()))
        if probed:
            state = replace(state, summary=progress.diagnostics(settings))
        key, seed = tuple(labels[axis.name] for axis in axes), labels.get(SEED, str(settings.seed))
        done.append((key, seed, settings, state))
    every = [(state.summary.get(of, {}), _metric_prefixes(settings)) for _, _, settings, state in done]
    for figures, looks in every:
        known |= dict.fromkeys((*figures, *(_without_prefix(name, looks) for name in figures)))
        metric = metric or _without_prefix(main_metric(figures) or "", looks)
    named_so = dict.fromkeys(f"{look}{metric}" for _, looks in every for look in looks)
    shared = next((name for name in named_so if all(name in figures for figures, _ in every)), None)
    having = dict[str, list[Key]]()  # figure -> the cells of which it is shown
    for (key, seed, _, state), (figures, looks) in zip(done, every, strict=True):
        named = shared or next((f"{look}{metric}" for look in looks if f"{look}{metric}" in figures), None)
        if named:
            having.setdefault(named, []).append(key)
        value = state.figure(of, named) if named else math.nan  # not another protocol's where this one's is no number
        if math.isfinite(value):
            values.setdefault(key, {})[seed] = value
        else:
            bad.setdefault(key, []).append(seed)
    if not done:
        raise UserError(f"none of {count(len(sweep.labels), 'run')} is done; {sweep.command}")
    if not values or not metric or metric not in known:
        hint = "; what runs measure of themselves is set by `analysis: [losses]`" if probed and not known else ""
        raise UserError(f"--metric: no run has a figure '{metric}'; {nearest(str(metric), known)}{hint}")
    seeds, less = {labels.get(SEED, "") for labels in sweep.labels}, lower_is_better(metric, falling)
    notes = tuple(_comparability_notes(sweep, [settings for _, _, settings, _ in done]))
    keys = [key for key, *_ in done]
    without = [key for key, (figures, _) in zip(keys, every, strict=True) if metric not in figures]
    if shared not in (None, metric) and len(without) < len(keys):
        who = _cells(without, keys)
        notes = (f"{who}: no {metric} of a global model; {shared}, which all runs have, is compared", *notes)
    elif len(having) > 1:
        parts = [f"{name} of {_cells(those, keys)}" for name, those in having.items()]
        notes = (f"not all figures are of one kind: {', '.join(parts)}", *notes)
    metric = " or ".join(having)
    chosen = [str(each) for each in sweep.choices().values()]
    return Cells(sweep, metric, of, axes, values, bad, len(seeds), chosen, tuple(options), published, less, notes)


def _choose_metric(sweep: Sweep, metric: str | None, of: str | None) -> tuple[str | None, str, Published | None]:
    """Return the figure of a table, None for that by which runs are compared, of which round, and what is published of
    it."""
    candidates = [each for each in sweep.published if metric in (None, each.figure[1])]
    silent = [each for each in candidates if each.metric == each.figure[1]]
    published = next((each for each in candidates if of in (None, each.figure[0])), next(iter(silent), None))
    if candidates:
        first = published or candidates[0]
        of, metric = of or first.figure[0], first.figure[1]
    of = of or "last"
    if of not in OF:
        raise UserError(f"--of: {of}; allowed: {', '.join(OF)}")
    if metric is not None and progress.is_diagnostic(metric) and of not in progress.DIAGNOSTICS_OF:
        raise UserError(
            f"--of: {of}: nothing that `analysis` measures is best; allowed: {', '.join(progress.DIAGNOSTICS_OF)}"
        )
    return metric, of, published


def _comparability_notes(sweep: Sweep, shown: Iterable[Settings]) -> list[str]:
    """Say where the runs of a table were not made with one code and the same data.

    Raises UserError where a mean would be over two things.

    Other versions of fedmpi and torch are no reason to refuse: most of their changes concern no run of the sweep. With
    checkpoint.changes=accept nothing is.
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
    for name, settings in runs.items():
        changes = RunDirectory(progress.directory(settings)).accepted_changes()
        notes += [f"mixed: {name}: {'; '.join(changes)}"] if changes else []
    return notes


def _metric_prefixes(settings: Settings) -> list[str]:
    """Return the prefixes of metric names of the protocols of a run."""
    return ["", *(f"{protocol}_" for protocol in settings.evaluate.protocol if protocol != "global")]


def _without_prefix(name: str, looks: Sequence[str]) -> str:
    """Return the metric without a prefix (accuracy of personal_accuracy): rows of a table may have other protocols."""
    return next((name.removeprefix(look) for look in looks if look and name.startswith(look)), name)


def _cells(some: Sequence[Key], every: Sequence[Key]) -> str:
    """Name cells by the labels of one axis if these tell them from all others, else by all their labels.

    >>> _cells([("per", "0.1"), ("per", "1")], [("per", "0.1"), ("per", "1"), ("avg", "1")])
    'per'
    """
    for place in range(len(every[0])):
        labels = dict.fromkeys(key[place] for key in some)
        if {key for key in every if key[place] in labels} == set(some):
            return shorten(" and ".join(labels))
    return shorten(" and ".join(dict.fromkeys(" ".join(key) for key in some))) or "the run"


def text(cells: Cells) -> list[str]:
    """Return the table as lines for the console."""
    lines = [caption(cells), "", *table(list(grid(cells, " +- ")), "left")]
    paired = list(differences(cells))
    if any(cell != "-" for row in paired[1:] for cell in row[1:]):
        lines += ["", about_differences(paired[0][0]), "", *table(paired, "left")]
    return [*lines, *(["", *gaps(cells)] if gaps(cells) else [])]


def about_differences(first: str) -> str:
    return (
        f"paired differences to {first} over seeds that both have, +- standard error; * where 0 is outside the 95 % "
        "interval (Student's t), cell by cell"
    )


def caption(cells: Cells) -> str:
    """Return a caption: the metric, and the command that makes the table."""
    words = [f"{cells.metric.replace('_', ' ')}, {WHAT[cells.of]}"]
    words.append(f"mean and sample standard deviation (n - 1) over {count(cells.seeds, 'seed')}")
    text = ", ".join(words)
    if cells.published:
        signs = "= within their standard deviation (ours where they give none), ~ within two, ! beyond, ? none is known"
        text += f"; in brackets: {cells.published.source or 'published'}: {signs}"
    if best := cells.sweep.best:
        how = f"{best.figure.replace('_', ' ')} {WHAT[best.of]}"
        over = f", seed {', '.join(best.using[SEED])}" if SEED in best.using else ""
        text += f"; chosen by {how}{over}: {'; '.join(cells.chosen)}"
    command = ["fedmpi", "table", str(cells.sweep.path), *map(shown, cells.sweep.given), *cells.options]
    return f"{text}. Made by: {' '.join(map(shlex.quote, command))}"


def gaps(cells: Cells) -> list[str]:
    """Return the notes, and which cells and seeds are missing or not a number."""
    lines = list(cells.notes)
    have = {key: cells.values.get(key, {}).keys() | set(cells.bad.get(key, [])) for key in cells.keys}
    missing = {  # a sweep without the axis seed asks for one run a cell, whatever its seed
        key: [seed for seed in cells.asked(key) if (seed not in have[key] if seed else not have[key])]
        for key in cells.keys
    }
    for what, of in (("missing", missing), ("not a number", cells.bad)):
        parts = [f"{' '.join(key)}{_seeds(seeds)}" for key, seeds in of.items() if seeds]
        if parts:
            more = f"; and {len(parts) - MOST_TOLD} more cells" if len(parts) > MOST_TOLD else ""
            lines.append(f"{what}: {'; '.join(parts[:MOST_TOLD])}{more}")
    if any(missing.values()):
        lines.append(f"to train what is missing: {cells.sweep.command}")
    return lines


def _seeds(seeds: Sequence[str]) -> str:
    return f" ({'seed ' + ', '.join(seeds)})" if any(seeds) else ""


def grid(cells: Cells, sign: str) -> Iterator[list[str]]:
    """Yield a heading, then a row for each label of the first axis: each cell with its published value."""
    rows, columns = sides(cells)
    yield [cells.axes[0].name if cells.axes else "", *(head(cells, column) for column in columns)]
    for row in rows:
        shown = []
        for column in columns:
            key = (*row, *column)
            ours, theirs = _cell(cells, key, sign), published_of(cells, key)
            shown.append(
                ours if theirs is None else f"{ours} [{_pair(theirs, sign, cells)} {verdict(cells, key, theirs)}]"
            )
        yield [" ".join(row), *shown]


def sides(cells: Cells) -> tuple[list[Key], list[Key]]:
    """Return the labels of the rows and of the columns."""
    keys = cells.keys
    rows, columns = dict.fromkeys(key[:1] for key in keys), dict.fromkeys(key[1:] for key in keys)
    return list(rows), list(columns)


def head(cells: Cells, column: Key) -> str:
    """Return the heading of a column: alpha 0.1 MNIST."""
    named = zip(cells.axes[1:], column, strict=True)
    each = [f"{axis.name.rpartition('.')[2]} {label}" if axis.is_key else label for axis, label in named]
    return " ".join(each) or cells.metric


def _cell(cells: Cells, key: Key, sign: str) -> str:
    mean, std, seeds, asked = cells.statistics(key)
    if not seeds:
        return "nan" if key in cells.bad else "-" if key in cells.keys else ""
    few = f" ({seeds} of {asked})" if seeds < asked else f" ({count(asked, 'seed')})"
    return _pair((mean, std), sign, cells) + ("" if seeds == cells.seeds else few)


def _digits(cells: Cells) -> int:
    """Return how many decimals are shown: enough for three digits of the largest value if that is small."""
    most = max(abs(v) for each in cells.values.values() for v in each.values())
    return 2 if most >= 2 else 3 if most >= 0.1 or not most else 2 - math.floor(math.log10(most))


def _pair(pair: tuple[float, float], sign: str, cells: Cells) -> str:
    digits = _digits(cells)
    mean, spread = pair
    return f"{mean:.{digits}f}" + ("" if math.isnan(spread) else f"{sign}{spread:.{digits}f}")


def published_of(cells: Cells, key: Key) -> tuple[float, float] | None:
    if cells.published is None:
        return None
    labels = dict(zip((axis.name for axis in cells.axes), key, strict=True))
    return cells.published.values.get(tuple(labels.get(name, "") for name in cells.published.axes))


def verdict(cells: Cells, key: Key, theirs: tuple[float, float]) -> str:
    """Judge the distance from the published value in published standard deviations, or in ours where there is none."""
    mean, std, seeds, _ = cells.statistics(key)
    if not seeds:
        return ""
    if not theirs[1] > 0 and abs(mean - theirs[0]) < 0.5 * 10 ** -_digits(cells):  # they read the same
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
    first, other = (cells.values.get((*each, *column), {}) for each in (sides(cells)[0][0], row))
    paired = [other[seed] - first[seed] for seed in other if seed in first]
    if len(paired) < 2:
        return None
    mean, error = fmean(paired), stdev(paired) / math.sqrt(len(paired))
    if not error or abs(mean) <= stdtrit(len(paired) - 1, 0.975) * error:  # equal differences say nothing of chance
        return mean, error, ""
    if progress.is_diagnostic(cells.metric):  # what less of it is good for, nobody has said
        return mean, error, "lower" if mean < 0 else "higher"
    return mean, error, "better" if (mean < 0) == cells.falling else "worse"


def differences(cells: Cells) -> Iterator[list[str]]:
    """Yield a heading, then a row of paired differences for each label of the first axis but the first."""
    rows, columns = sides(cells)
    if not cells.axes or len(rows) < 2:
        return
    yield [" ".join(rows[0]), *(head(cells, column) for column in columns)]
    for row in rows[1:]:
        compared = [difference(cells, row, column) for column in columns]
        shown = [f"{each[0]:+.4g} +- {each[1]:.2g}{each[2] and ' * ' + each[2]}" if each else "-" for each in compared]
        yield [" ".join(row), *shown]
