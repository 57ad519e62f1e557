"""Show how each rank spent its time, as shares and drawings, for reports and for `fedmpi analyse timeline`.

A lap is a kind of activity, such as training or waiting for uploads; engine/tracing.py explains the names. A rank's
share of a lap is its seconds in all rounds of a job, divided by the seconds of these rounds on that rank. Waiting is
the sum of the laps in WAITS, and the busiest rank is the rank with the smallest share of waiting. Of a resumed run only
the last job is analysed. Times are those of each host's own clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmpi.analysis import charts, output
from fedmpi.analysis.charts import BarChart, stack_bars
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.engine.tracing import WAIT_SPANS
from fedmpi.reports.page import Figure, Value
from fedmpi.reports.run_groups import subsample
from fedmpi.runtime.inspection.run_files import check_written_by_this_version, read_json_object
from fedmpi.runtime.record.run_dir import TRACE, read_timelines

MAX_SPAN_KINDS, MAX_RANKS = 6, 24  # laps with their own colour, and ranks in a drawing, at most
JobTimeline = dict[str, Any]


def write_timeline(run: Path, rounds: int, to: Path, print_line: Callable[[str], None]) -> None:
    """Print a table of time shares, and write timeline.json, .svg and .png (`fedmpi analyse timeline`).

    rounds: number of rounds in the drawing, which are the last ones.
    """
    to, job = output.create_output_folder(to), read_last_job(run)
    by_rank = compute_time_shares(job)
    for text in format_time_shares(by_rank):
        print_line(text)
    print_line(f"written: {output.write_json(to / 'timeline.json', {'run': str(run), 'ranks': by_rank})}")
    _, figure = plot_timeline(job, rounds)
    for name in ("timeline.svg", "timeline.png"):
        charts.write_chart(figure.chart, to / name, figure.title)
    print_line(f"written: {to / 'timeline.svg'}, {to / 'timeline.png'}")


def read_last_job(run: Path) -> JobTimeline:
    """Return the records of the last job of a run. Raises UserError if there are none, or if they are damaged."""
    check_written_by_this_version(run, read_json_object(run / "identity.json") or {})
    try:
        jobs: list[JobTimeline] = [
            job for job in read_timelines(run) if any(r["rounds"] for r in job["ranks"].values())
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{run / TRACE} is damaged: a line is not as fedmpi writes it ({error})") from error
    if not jobs:
        why = "written by `fedmpi run` unless the config has trace: false"
        raise UserError(f"{run} holds no {TRACE}/rank-*.jsonl with a round in it: {why}")
    return jobs[-1]


def compute_time_shares(job: JobTimeline) -> list[dict[str, Any]]:
    """Return one row for each rank with the shares of its time.

    Returns:
        rank, host; rounds (their number), seconds (in all rounds); shares from 0 to 1: busy, waiting, and laps, a
        mapping of each lap to its share.
    """
    by_rank = []
    for rank, each in sorted(job["ranks"].items()):
        ms, total = Counter[str](), sum(line["s"] for line in each["rounds"])
        for line in each["rounds"]:
            for what, _, length, *_ in line["spans"]:
                ms[what] += length
            ms.update(line.get("rest", {}))
        if total > 0:
            share = {what: length / 1e3 / total for what, length in ms.most_common()}
            waiting = sum(share.get(what, 0.0) for what in WAIT_SPANS)
            facts = {"rank": rank, "host": each["host"], "rounds": len(each["rounds"]), "seconds": total}
            by_rank.append({**facts, "busy": 1 - waiting, "waiting": waiting, "laps": share})
    return by_rank


def format_time_shares(by_rank: Sequence[dict[str, Any]]) -> list[str]:
    laps = list(dict.fromkeys(lap for each in by_rank for lap in each["laps"]))
    rows: list[list[object]] = [["rank", "host", "rounds", "s a round", "busy", "waiting", *laps]]
    for each in by_rank:
        parts = [each["busy"], each["waiting"], *(each["laps"].get(what, 0.0) for what in laps)]
        percent = [f"{100 * part:.1f} %" for part in parts]
        seconds = f"{each['seconds'] / max(each['rounds'], 1):.3f}"
        rows.append([str(each["rank"]), each["host"], each["rounds"], seconds, *percent])
    return [*formatting.format_table(rows), f"{_describe_busiest_rank(by_rank)} (waiting: {', '.join(WAIT_SPANS)})"]


def plot_timeline(job: JobTimeline, rounds: int) -> tuple[Figure, Figure]:
    """Return two figures: seconds by rank and lap in all rounds, and the timeline of the last `rounds` rounds."""
    by_rank = compute_time_shares(job)
    seconds = {each["rank"]: {lap: part * each["seconds"] for lap, part in each["laps"].items()} for each in by_rank}
    total = Counter[str]()
    for laps in seconds.values():
        total.update(laps)
    kinds = [lap for lap, _ in total.most_common(MAX_SPAN_KINDS)]
    kind_of = {lap: lap if lap in kinds else "other" for lap in total}
    kinds += ["other"] if len(total) > MAX_SPAN_KINDS else []
    ranks = subsample(list(seconds), MAX_RANKS)
    names = [f"rank {rank}" for rank in ranks]
    parts = {
        kind: [sum(s for lap, s in seconds[rank].items() if kind_of[lap] == kind) for rank in ranks] for kind in kinds
    }
    chart = stack_bars(names, parts, "seconds in all rounds of the last job")
    data: list[list[Value]] = [
        [each["rank"], each["host"], lap, s] for each in by_rank for lap, s in seconds[each["rank"]].items()
    ]
    note = f"{_describe_busiest_rank(by_rank)} ({', '.join(WAIT_SPANS)}). docs/analysis.md explains the spans."
    bars = Figure("laps", "seconds by rank and lap", chart, ("rank", "host", "lap", "seconds"), data, note)

    lines = [(i, line) for i, rank in enumerate(ranks) for line in job["ranks"][rank]["rounds"]]
    first = max(line["round"] for _, line in lines) - rounds + 1
    lines = [(i, line) for i, line in lines if line["round"] >= first]
    begin = min(line["at"] for _, line in lines)
    spans: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in kinds}
    rows = list[list[Value]]()
    for i, line in lines:
        for what, start, ms, *client in line["spans"]:
            at = line["at"] - begin + start / 1e3
            spans[kind_of[what]].append((i, at, at + ms / 1e3))
            rows.append([ranks[i], line["round"], what, at, ms / 1e3, str(client[0]) if client else ""])
    title = f"the last {rounds} rounds, rank by rank" if rounds > 1 else "the last round, rank by rank"
    head = ("rank", "round", "lap", "from_s", "seconds", "client")
    return bars, Figure("timeline", title, BarChart(names, spans, "seconds"), head, rows)


def _describe_busiest_rank(by_rank: Sequence[dict[str, Any]]) -> str:
    least = min(by_rank, key=lambda each: (each["waiting"], each["rank"]))
    return f"Rank {least['rank']} is the busiest: it waits {100 * least['waiting']:.1f} % of the time"
