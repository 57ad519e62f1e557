"""How well each class of the global test set is recognised."""

from __future__ import annotations

from statistics import fmean

from fedmpi.analysis.pages.run import Run, number
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Figure, Grid, Section, Value

KEY = "class_accuracy"  # in metrics.jsonl: percent of each class's test samples that are recognised
SHOWN = 120  # rounds at most, evenly chosen
Rows = dict[int, list[float | None]]  # round -> a figure of each class


def accuracy(runs: Runs) -> Section | None:
    """Of one group a column a round, mean over its runs; of several a row a group, after the last round."""
    found = {group.name(): rows for group in runs.groups if (rows := _mean([_rows(run) for run in group.runs]))}
    if not found:
        return None
    width = max(len(row) for rows in found.values() for row in rows.values())
    names = [str(c) for c in range(width)]
    note = "Percent of the samples of a class in the global test set that are recognised as of it."
    if len(found) > 1:
        last = {name: _filled(rows[max(rows)], width) for name, rows in found.items()}
        chart = Grid(list(last), names, list(last.values()), "settings", "class", "%", written=True)
        data: list[list[Value]] = [[name, c, row[c]] for name, row in last.items() for c in range(width)]
        figure = Figure(
            "classes", "accuracy by class, last round", chart, ("settings", "class", "accuracy"), data, note
        )
        return Section("classes", "Classes", (figure,))
    (rows,) = found.values()
    data = [[t, c, row[c]] for t, row in rows.items() for c in range(len(row))]
    every = -(-len(rows) // SHOWN)
    shown = [t for i, t in enumerate(rows) if not i % every]
    values = [[_filled(rows[t], width)[c] for t in shown] for c in range(width)]
    chart = Grid(names, [str(t) for t in shown], values, "class", "round", "%", written=len(shown) < 10)
    note += f" Every {every}th evaluated round is drawn." if every > 1 else ""
    figure = Figure("classes", "accuracy by class and round", chart, ("round", "class", "accuracy"), data, note)
    return Section("classes", "Classes", (figure,))


def _rows(run: Run) -> Rows:
    return {row["round"]: [number(v) for v in row[KEY]] for row in run.rows if isinstance(row.get(KEY), list)}


def _mean(runs: list[Rows]) -> Rows:
    """Of the runs that have the round, class by class."""
    found: Rows = {}
    for t in sorted({t for rows in runs for t in rows}):
        columns = zip(*(rows[t] for rows in runs if t in rows), strict=False)
        known = [[v for v in column if v is not None] for column in columns]
        found[t] = [fmean(values) if values else None for values in known]
    return found


def _filled(row: list[float | None], width: int) -> list[float | None]:
    return [*row, *[None] * (width - len(row))]
