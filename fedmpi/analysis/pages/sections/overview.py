"""What the runs are, in a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from fedmpi.analysis.pages.run import Run, named, number
from fedmpi.analysis.pages.runs import Group, Runs
from fedmpi.analysis.pages.section import Section, Table, Text, Value
from fedmpi.common.text import count, figure
from fedmpi.runtime.reading.digests import CODE

FIGURES = 4  # columns


def summary(runs: Runs) -> Section | None:
    """A row a group: its last figures, mean and standard deviation over the runs; of one run its figures in rows."""
    warnings = [Text(text, warning=True) for text in _warnings(runs)]
    names = [name for name in runs.figures() if not name.endswith(("_std", "_worst_decile"))]
    if runs.alone is not None:
        rows = _figures(runs.alone, names)
        facts = Table(("what", "value"), _facts(runs.alone))
        figures = (
            [Table(("figure", "last", "mean of the last ten", "best", "in round"), rows, note=BIASED)] if rows else []
        )
        return Section("summary", "Summary", (*warnings, facts, *figures))
    table = [[g.name(), f"{sum(r.complete for r in g.runs)} of {len(g.runs)}",
              *(_cell(g, name) for name in names[:FIGURES])] for g in runs.groups]  # fmt: skip
    note = "Last evaluated round, mean ± sample standard deviation over the runs of these settings."
    head = ("settings", "runs finished", *(name.replace("_", " ") for name in names[:FIGURES]))
    return Section("summary", "Summary", (*warnings, Table(head, table, note=note)))


BIASED = "The best round is chosen by the test set itself, so it flatters."


def _warnings(runs: Runs) -> list[str]:
    open_ = [run for run in runs.all if not run.complete]
    found = (
        [f"{count(len(open_), 'run')} of {len(runs.all)} not finished: figures are of the rounds so far."]
        if open_ and not runs.alone
        else []
    )
    if runs.alone and open_:
        found = [f"This run has not finished ({runs.alone.state}): figures are of the rounds so far."]
    if hidden := [key[1:-1] for key in runs.differing if key.startswith("(")]:
        found.append(f"Runs differ in {', '.join(hidden)}, though the settings say the same; no mean is over both.")
    if again := [runs.label(run) for group in runs.groups for run in group.again]:
        found.append(f"Not in any mean, for another run has the same settings, data and seed: {', '.join(again)}.")
    if len({run.identity[CODE] for run in runs.all if CODE in run.identity}) > 1:
        found.append(f"Not all runs were made with one {CODE[1:-1]}; see Environment.")
    if odd := [run.name for run in runs.all if not _in_turn([row["round"] for row in run.rows if row["round"] >= 0])]:
        found.append(f"Rounds are missing from metrics.jsonl, or stand there twice: {', '.join(odd)}.")
    notes = sum(len(run.notes) for run in runs.all)
    return found + ([f"Not all files could be read; see Faults ({count(notes, 'note')})."] if notes else [])


def _in_turn(rounds: Sequence[int]) -> bool:
    return list(rounds) == list(range(len(rounds)))


def _facts(run: Run) -> list[list[Value]]:
    c, done = run.config, sum(row["round"] >= 0 for row in run.rows)
    wall = sum(number(row.get("wall_s")) or 0.0 for row in run.rows)
    facts = {
        "method": named(c.get("method.name")),
        "data": named(c.get("data.source")),
        "model": named(c.get("model.name")),
        "clients": run.partition.get("clients"),
        "partition": run.partition.get("scheme"),
        "rounds": f"{done} of {c.get('rounds', '?')}",
        "ranks": len(run.environment.get("ranks") or ()) or None,
        "seed": run.seed,
        "ended": run.state,
        "seconds in rounds": f"{wall:.1f}" if done else None,
    }
    return [[key, str(value)] for key, value in facts.items() if value not in (None, "")]


def _figures(run: Run, names: list[str]) -> list[list[Value]]:
    rows = list[list[Value]]()
    for name in names:
        parts: list[dict[str, Any]] = [
            run.summary.get(part) or {} for part in ("last", "mean_last_10", "best", "best_round")
        ]
        if not run.series(name)[0]:
            continue
        last, mean, best = run.last(name), *(number(part.get(name)) for part in parts[1:3])
        said = [None if v is None else figure(name, v, 4) for v in (last, mean, best)]
        rows.append([name.replace("_", " "), *said, parts[3].get(name)])
    return rows


def _cell(group: Group, name: str) -> str:
    last = [value for run in group.runs if (value := run.last(name)) is not None]
    if not last:
        return "-"
    spread = f" ± {figure(name, stdev(last))}" if len(last) > 1 else ""
    return f"{figure(name, fmean(last))}{spread}" + (f" ({len(last)} runs)" if len(last) < len(group.runs) else "")
