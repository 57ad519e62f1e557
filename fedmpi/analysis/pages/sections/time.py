"""Where the seconds went: by round, by rank and lap, and the last rounds as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedmpi.analysis.pages.grouping import figure, means, rounds_in
from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Bars, Figure, Lines, Section, Series, Span, Spans, Table, Text, Value
from fedmpi.analysis.timeline import busiest, real_rounds, shares
from fedmpi.common.metrics_row import SECONDS
from fedmpi.engine.timeline import WAITS

SAID = ("round", "busiest rank trains", "rank 0 waits", "server step", "evaluation")
LAPS, RANKS, ROUNDS, SPANS = 6, 24, 3, 2000  # laps that have a colour; ranks, rounds and spans drawn at most


def seconds(runs: Runs) -> Section | None:
    """Of one group the parts of a round, of several the whole round; of one run also each rank's laps."""
    parts = list[Figure | Table | Text]()
    if len(runs.groups) == 1:
        found = {name: means(rounds_in(run, name) for run in runs.groups[0].runs) for name in SECONDS}
        series = [
            Series(said, list(found[name]), [m for m, _, _ in found[name].values()])
            for name, said in zip(SECONDS, SAID, strict=True) if found[name]
        ]  # fmt: skip
        data: list[list[Value]] = [
            [t, *(found[name].get(t, (None,))[0] for name in SECONDS)] for t in found["wall_s"] or found["evaluate_s"]
        ]
        if data:
            chart = Lines(series, "round", "seconds", from_zero=True)
            parts.append(Figure("seconds", "seconds a round", chart, ("round", *SECONDS), data, _measured(runs)))
    elif made := figure(runs, "seconds", "seconds a round", "seconds", partial(rounds_in, name="wall_s"), "wall_s"):
        parts.append(made)
    if runs.alone is not None:
        parts += _ranks(runs.alone)
    return Section("time", "Time", parts) if parts else None


def _measured(runs: Runs) -> str:
    many = any(run.config.get("analysis") for run in runs.all)
    return "Rounds in which `analysis` measures train their clients twice, which counts." if many else ""


def _ranks(run: Run) -> list[Figure | Table | Text]:
    """What timeline/ tells of the last job."""
    jobs = [job for job in run.timeline if any(each["rounds"] for each in job["ranks"].values())]
    if not jobs:
        return [Text("What each rank did when is not recorded (timeline: false), or not yet.")]
    found = shares(jobs[-1])
    if not found:
        return []
    total: dict[str, float] = {}
    for each in found:
        for lap, share in each["laps"].items():
            total[lap] = total.get(lap, 0.0) + share * each["seconds"]
    shown = sorted(total, key=lambda lap: -total[lap])[:LAPS]
    names = [*shown, *(["other"] if len(total) > LAPS else [])]
    kept = found[:: -(-len(found) // RANKS)]
    length = {name: [_length(each, name, shown) for each in kept] for name in names}
    data: list[list[Value]] = [
        [each["rank"], each["host"], lap, share * each["seconds"]]
        for each in found
        for lap, share in each["laps"].items()
    ]
    least = busiest(found)
    note = f"Rank {least['rank']} is the busiest: it waits {100 * least['waiting']:.1f} % of the time "
    note += f"({', '.join(WAITS)}). What the laps are: docs/analysis.md, What ranks do when."
    labels = [f"rank {each['rank']}" for each in kept]
    bars = Figure("laps", "seconds by rank and lap", Bars(labels, length, "seconds in all rounds of the last job"),
                  ("rank", "host", "lap", "seconds"), data, note)  # fmt: skip
    return [bars, *_last(jobs[-1], names)]


def _length(each: dict[str, Any], name: str, shown: list[str]) -> float:
    laps = each["laps"]
    share = laps.get(name, 0.0) if name in shown else sum(v for lap, v in laps.items() if lap not in shown)
    return float(share * each["seconds"])


def _last(job: dict[str, Any], names: list[str]) -> list[Figure]:
    """The last rounds, fewer where they hold many spans."""
    ranks = sorted(job["ranks"])[:: -(-len(job["ranks"]) // RANKS)]
    last = max(real_rounds(job))
    for rounds in range(ROUNDS, 0, -1):
        lines = [(i, line) for i, rank in enumerate(ranks) for line in job["ranks"][rank]["rounds"]
                 if line["round"] > last - rounds]  # fmt: skip
        if sum(len(line["spans"]) for _, line in lines) <= SPANS:
            break
    begin = min(line["at"] for _, line in lines)
    spans, data = list[Span](), list[list[Value]]()
    for i, line in lines:
        for what, start, ms, *client in line["spans"]:
            at = line["at"] - begin + start / 1e3
            kind, who = what if what in names else "other", f", client {client[0]}" if client else ""
            said = f"rank {ranks[i]}, round {line['round']}: {what}{who}, {ms} ms"
            spans.append(Span(i, at, at + ms / 1e3, kind, said))
            data.append([ranks[i], line["round"], what, at, ms / 1e3, str(client[0]) if client else ""])
    title = f"the last {rounds} rounds, rank by rank" if rounds > 1 else "the last round, rank by rank"
    chart = Spans([f"rank {rank}" for rank in ranks], spans, names, "seconds")
    return [Figure("timeline", title, chart, ("rank", "round", "lap", "from_s", "seconds", "client"), data)]
