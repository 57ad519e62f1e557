"""Show how each rank spent its time, in tables and figures, for reports and for `fedmpi analyse timeline`.

The trace of a run consists of spans, such as training or waiting for uploads; engine/tracing.py explains their names.
The share of a kind of span is its total duration in all rounds of a job, divided by the duration of these rounds on the
same rank. Waiting is the sum of the spans in WAIT_SPANS, and the busiest rank is the one with the smallest share of
waiting. If a run was resumed, only its last job is analysed. Times are read from the clock of each host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmpi.analysis import charts, output
from fedmpi.analysis.charts import BarChart, make_stacked_bar_chart
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.engine.tracing import WAIT_SPANS
from fedmpi.reports.page import Figure, Value
from fedmpi.reports.run_groups import subsample
from fedmpi.runtime.inspection.run_files import check_written_by_this_version, read_json_object
from fedmpi.runtime.record.run_dir import TRACE, read_timelines

MAX_SPAN_KINDS, MAX_RANKS = 6, 24  # in a figure: kinds of spans with their own colour, and ranks
JobTimeline = dict[str, Any]


def write_timeline(run: Path, rounds: int, to: Path, print_line: Callable[[str], None]) -> None:
    """Print the share of time that each rank spent on each kind of work, and write timeline.json, .svg and .png.

    Args:
        run: the run directory.
        rounds: the number of rounds that the figure shows, counted back from the last one.
        to: the output directory.
        print_line: prints a line of output.

    Raises:
        UserError: if the run has no trace, or its trace is damaged.
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
    """Read the trace of the last job of a run; raise UserError if there is none, or if it is damaged."""
    check_written_by_this_version(run, read_json_object(run / "identity.json") or {})
    try:
        jobs: list[JobTimeline] = [
            job for job in read_timelines(run) if any(r["rounds"] for r in job["ranks"].values())
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{run / TRACE} is damaged: a line has an unexpected content ({error})") from error
    if not jobs:
        reason = "`fedmpi run` writes them unless the config has trace: false"
        raise UserError(f"{run} contains no {TRACE}/rank-*.jsonl with a finished round; {reason}")
    return jobs[-1]


def compute_time_shares(job: JobTimeline) -> list[dict[str, Any]]:
    """Compute how each rank spent its time.

    Returns:
        One dict for each rank, with the keys `rank` and `host`; `rounds`, the number of rounds; `seconds`, their total
        duration; `busy` and `waiting`, shares from 0 to 1; and `spans`, the share of each kind of span.
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
            by_rank.append({**facts, "busy": 1 - waiting, "waiting": waiting, "spans": share})
    return by_rank


def format_time_shares(by_rank: Sequence[dict[str, Any]]) -> list[str]:
    """Format the result of `compute_time_shares` as lines of text, in a table with one row per rank."""
    names = list(dict.fromkeys(name for each in by_rank for name in each["spans"]))
    rows: list[list[object]] = [["rank", "host", "rounds", "s a round", "busy", "waiting", *names]]
    for each in by_rank:
        parts = [each["busy"], each["waiting"], *(each["spans"].get(what, 0.0) for what in names)]
        percent = [f"{100 * part:.1f} %" for part in parts]
        seconds = f"{each['seconds'] / max(each['rounds'], 1):.3f}"
        rows.append([str(each["rank"]), each["host"], each["rounds"], seconds, *percent])
    return [*formatting.format_table(rows), f"{_describe_busiest_rank(by_rank)} (waiting: {', '.join(WAIT_SPANS)})"]


def plot_timeline(job: JobTimeline, rounds: int) -> tuple[Figure, Figure]:
    """Return two figures: each rank's total time by kind of span, and the timeline of the last `rounds` rounds."""
    by_rank = compute_time_shares(job)
    seconds = {each["rank"]: {span: part * each["seconds"] for span, part in each["spans"].items()} for each in by_rank}
    total = Counter[str]()
    for seconds_of_rank in seconds.values():
        total.update(seconds_of_rank)
    kinds = [span for span, _ in total.most_common(MAX_SPAN_KINDS)]
    kind_of = {span: span if span in kinds else "other" for span in total}
    kinds += ["other"] if len(total) > MAX_SPAN_KINDS else []
    ranks = subsample(list(seconds), MAX_RANKS)
    names = [f"rank {rank}" for rank in ranks]
    parts = {
        kind: [sum(s for span, s in seconds[rank].items() if kind_of[span] == kind) for rank in ranks] for kind in kinds
    }
    chart = make_stacked_bar_chart(names, parts, "seconds in all rounds of the last job")
    data: list[list[Value]] = [
        [each["rank"], each["host"], span, s] for each in by_rank for span, s in seconds[each["rank"]].items()
    ]
    note = f"{_describe_busiest_rank(by_rank)} ({', '.join(WAIT_SPANS)}). docs/analysis.md explains the spans."
    bars = Figure("spans", "seconds by rank and span", chart, ("rank", "host", "span", "seconds"), data, note)

    rounds_of_ranks = [(i, line) for i, rank in enumerate(ranks) for line in job["ranks"][rank]["rounds"]]
    first = max(line["round"] for _, line in rounds_of_ranks) - rounds + 1
    rounds_of_ranks = [(i, line) for i, line in rounds_of_ranks if line["round"] >= first]
    first_start = min(line["at"] for _, line in rounds_of_ranks)
    spans: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in kinds}
    rows = list[list[Value]]()
    for i, line in rounds_of_ranks:
        for name, start, duration_ms, *client in line["spans"]:
            start_s = line["at"] - first_start + start / 1e3
            spans[kind_of[name]].append((i, start_s, start_s + duration_ms / 1e3))
            rows.append([ranks[i], line["round"], name, start_s, duration_ms / 1e3, str(client[0]) if client else ""])
    title = f"the last {rounds} rounds, rank by rank" if rounds > 1 else "the last round, rank by rank"
    head = ("rank", "round", "span", "from_s", "seconds", "client")
    return bars, Figure("timeline", title, BarChart(names, spans, "seconds"), head, rows)


def _describe_busiest_rank(by_rank: Sequence[dict[str, Any]]) -> str:
    """Return a sentence that names the rank with the smallest share of waiting, and this share."""
    least = min(by_rank, key=lambda each: (each["waiting"], each["rank"]))
    return f"Rank {least['rank']} is the busiest: it waits {100 * least['waiting']:.1f} % of the time"
