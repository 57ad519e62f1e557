"""A metric against the parameters that clients have sent and received by then.

The counts are `up_parameters` and `down_parameters` in metrics.jsonl: for each round, the sum over its cohort. The
value after round t is plotted over the sums of rounds 0 .. t. Ratios compare averages per round with those of the first
run. That a round without coefficients costs beta of a full one, as the paper puts it, holds only for small theta_h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedmpi.analysis import charts, report
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.text import format_metric, metric_title, nearest
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.record.summary import metric_names

COLUMNS = ("run", "rounds", "up", "down", "up + down", "ratio up", "ratio down", "ratio")


def analyse(runs: Sequence[Path], metric: str, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse communication`."""
    to = report.folder(to)
    curves = [curve(run, metric) for run in runs]
    say("parameters transmitted in an average round, over all its clients, and ratios to the first run")
    for text in table(curves, metric):
        say(text)
    say(f"written: {report.write(to / 'communication.json', {'metric': metric, 'runs': curves})}")
    lines = [
        charts.Series(
            one["run"],
            [point["up"] + point["down"] for point in one["points"]],
            [point["value"] for point in one["points"]],
        )
        for one in curves
    ]
    chart = charts.Lines(lines, "parameters sent and received, all clients", metric_title(metric), integer_x=False)
    title = f"{metric_title(metric)} by what was transmitted"
    say(f"written: {charts.write(chart, to / 'communication.png', title)}")


def curve(run: Path, metric: str) -> dict[str, Any]:
    """One run: its totals, and {round, up, down, value} for each round in which the metric was measured.

    Raises UserError: no run directory, no such metric, a metric of fewer than two rounds, or no counts of parameters.
    """
    if not (run / "metrics.jsonl").is_file():
        raise UserError(f"{run} is no run directory: it holds no metrics.jsonl")
    rows = RunDirectory(run).rows("metrics.jsonl")
    if not rows:
        raise UserError(f"{run}: metrics.jsonl is empty: no round is complete")
    names = metric_names(rows)
    if metric not in names:
        raise UserError(f"--metric: {run} has no '{metric}'; {nearest(metric, names)}")
    up, down = (list(accumulate(int(row[f"{way}_parameters"]) for row in rows)) for way in ("up", "down"))
    points = [
        {"round": row["round"], "up": up[i], "down": down[i], "value": row[metric]}
        for i, row in enumerate(rows)
        if row.get(metric) is not None
    ]
    if len(points) < 2:
        raise UserError(f"{run}: {metric} was measured after {len(points)} round; a curve needs 2 or more")
    return {"run": str(run), "rounds": len(rows), "up": up[-1], "down": down[-1], "points": points}


def table(curves: Sequence[dict[str, Any]], metric: str) -> list[str]:
    """Parameters of an average round, their ratio to the first run's, the last value."""
    rows: list[list[object]] = [[*COLUMNS, metric]]
    averages = [[one[way] / one["rounds"] for way in ("up", "down")] for one in curves]
    for one, (up, down) in zip(curves, averages, strict=True):
        pairs = zip((up, down, up + down), (*averages[0], sum(averages[0])), strict=True)
        ratios = [f"{a / b:.3f}" if b else "-" for a, b in pairs]
        last = format_metric(metric, one["points"][-1]["value"], 4)
        rows.append([one["run"], one["rounds"], *map(round, (up, down, up + down)), *ratios, last])
    return formatting.table(rows)
