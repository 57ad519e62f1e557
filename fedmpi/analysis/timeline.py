"""Which rank did what when: shares of time by rank, and a drawing.

What a lap's name means stands in engine/timeline.py. A rank's share of a lap is its seconds in all rounds of a job over
the seconds of those rounds on that rank; waiting is the sum of WAITS. The busiest rank is the one that waits least.
Only the last job of a run that was gone on with is looked at. Clocks are those of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from fedmpi.analysis import report
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.engine.timeline import WAITS
from fedmpi.runtime.record import timeline

SHOWN, WIDTH, LEFT, ROW, THINNEST = 64, 1200, 90, 22, 0.2  # ranks; pixels
COLOURS = {
    "train": "#0072B2", "evaluate": "#009E73", "step": "#D55E00", "announce": "#E69F00", "send": "#56B4E9",
    "checkpoint": "#CC79A7", "hash": "#F0E442", "word": "#E0E0E0", "uploads": "#C8C8C8",
    "download": "#8C6D31", "move": "#8A6BBE", "settle": "#707070", "analyse": "#00CED1", "recover": "#B22222",
}  # fmt: skip
OTHER = "#000000"
LEGEND = 10  # entries a line
CLOSING = {"announce", "word", "settle", "hash", "checkpoint", "evaluate", "end"}  # all that is behind the last round
Job = dict[str, Any]


def analyse(run: Path, rounds: int, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse timeline`: a table, timeline.json (shares), timeline.svg (the last `rounds` rounds)."""
    to = report.folder(to)
    job = last_job(run)
    try:
        found = shares(job)
        picture = drawing(job, rounds)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{run / timeline.FOLDER} is damaged: a line is not as fedmpi writes it ({error})") from error
    for text in table(found):
        say(text)
    say(f"written: {report.write(to / 'timeline.json', {'run': str(run), 'ranks': found})}")
    (to / "timeline.svg").write_text(picture, encoding="utf-8")
    say(f"written: {to / 'timeline.svg'}")


def last_job(run: Path) -> Job:
    """Raises UserError where there is none."""
    jobs: list[Job] = [job for job in timeline.read(run) if any(r["rounds"] for r in job["ranks"].values())]
    if not jobs:
        why = "written by `fedmpi run` unless the config has timeline: false"
        raise UserError(f"{run} holds no {timeline.FOLDER}/rank-*.jsonl with a round in it: {why}")
    return jobs[-1]


def real_rounds(job: Job) -> set[int]:
    """The numbers of rounds; what is done behind the last one, its evaluation say, is a line of its own, and none."""
    lines = [line for each in job["ranks"].values() for line in each["rounds"]]
    found = {line["round"] for line in lines if {*(span[0] for span in line["spans"]), *line.get("rest", ())} - CLOSING}
    return found or {line["round"] for line in lines}


def shares(job: Job) -> list[dict[str, Any]]:
    """For each rank: seconds of its rounds, and the share of each lap, of waiting, and of all else (busy)."""
    found, real = [], real_rounds(job)
    for rank, each in sorted(job["ranks"].items()):
        laps: dict[str, float] = {}
        total = sum(line["s"] for line in each["rounds"])
        for line in each["rounds"]:
            for what, _, ms, *_ in line["spans"]:
                laps[what] = laps.get(what, 0.0) + ms / 1e3
            for what, ms in line.get("rest", {}).items():
                laps[what] = laps.get(what, 0.0) + ms / 1e3
        if total <= 0:
            continue
        share = {what: s / total for what, s in sorted(laps.items(), key=lambda item: -item[1])}
        waiting = sum(share.get(what, 0.0) for what in WAITS)
        rounds = len({line["round"] for line in each["rounds"]} & real)
        facts = {"rank": rank, "host": each["host"], "rounds": rounds, "seconds": total}
        found.append({**facts, "busy": 1 - waiting, "waiting": waiting, "laps": share})
    return found


def busiest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(found, key=lambda each: (each["waiting"], each["rank"]))


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    total: dict[str, float] = {}
    for each in found:
        for what, share in each["laps"].items():
            total[what] = total.get(what, 0.0) + share
    laps = sorted(total, key=lambda what: -total[what])
    rows: list[list[object]] = [["rank", "host", "rounds", "s a round", "busy", "waiting", *laps]]
    for each in found:
        seconds = f"{each['seconds'] / max(each['rounds'], 1):.3f}"
        parts = [each["busy"], each["waiting"], *(each["laps"].get(what, 0.0) for what in laps)]
        percent = [f"{100 * part:.1f} %" for part in parts]
        rows.append([str(each["rank"]), each["host"], each["rounds"], seconds, *percent])
    least = busiest(found)
    said = f"rank {least['rank']} is the busiest: it waits {100 * least['waiting']:.1f} % of the time"
    return [*formatting.table(rows), f"{said} (waiting: {', '.join(WAITS)})"]


def drawing(job: Job, rounds: int) -> str:
    """An SVG: a row a rank, at most SHOWN of them, over the last `rounds` rounds."""
    ranks = sorted(job["ranks"])
    ranks = ranks if len(ranks) <= SHOWN else [ranks[i * len(ranks) // SHOWN] for i in range(SHOWN)]
    last = max(real_rounds(job))
    lines = {r: [x for x in job["ranks"][r]["rounds"] if x["round"] > last - rounds] for r in ranks}
    begin = min(x["at"] for each in lines.values() for x in each)
    scale = WIDTH / max(max(x["at"] + x["s"] for each in lines.values() for x in each) - begin, 1e-9)
    parts, seen = [], dict[str, str]()
    for y, rank in enumerate(ranks, 1):
        parts.append(f'<text x="4" y="{y * ROW + 15}">rank {rank}</text>')
        for line in lines[rank]:
            for what, start, ms, *client in line["spans"]:
                x, width = LEFT + (line["at"] - begin + start / 1e3) * scale, ms / 1e3 * scale
                if width < THINNEST:
                    continue
                seen[what] = COLOURS.get(what, OTHER)
                who = f" client {client[0]}" if client else ""
                title = escape(f"rank {rank}, round {line['round']}: {what}{who}, {ms} ms")
                box = f'x="{x:.1f}" y="{y * ROW + 2}" width="{width:.1f}" height="{ROW - 4}" fill="{seen[what]}"'
                parts.append(f"<rect {box}><title>{title}</title></rect>")
    foot = f"{WIDTH / scale:.3f} s, rounds {max(last - rounds + 1, 0)} to {last}, and what came behind it"
    parts.append(f'<text x="{LEFT}" y="15">{foot}</text>')
    for i, (what, colour) in enumerate(sorted(seen.items())):
        x, y = LEFT + 110 * (i % LEGEND), (len(ranks) + 1 + i // LEGEND) * ROW
        parts.append(f'<rect x="{x}" y="{y + 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 17}">{escape(what)}</text>')
    size = f'width="{LEFT + WIDTH + 10}" height="{(len(ranks) + 3 + len(seen) // LEGEND) * ROW}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, "</svg>", ""])
