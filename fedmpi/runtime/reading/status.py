"""How far the run in a directory is, by its files alone.

running           its job holds the directory's lock; where locks do not tell, it has written lately
finished          all rounds are made, or evaluate.best.patience ended them
stopped           a signal or a time limit; `fedmpi resume` goes on
failed            it says why
died              nobody is at work there, and it did not say why: killed, or the power was cut
never started     it ended before its first line, or has not begun

seconds a round   mean of the last WINDOW ones, without the first of a job, which is longer than the others
left              that times the rounds to come
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedmpi.common.formatting import duration
from fedmpi.common.host_memory import size_text
from fedmpi.common.jsonl import JsonLines, parse_jsonl, read_jsonl
from fedmpi.common.metrics_row import NOT_METRICS
from fedmpi.common.text import count, format_metric
from fedmpi.runtime.reading import files
from fedmpi.runtime.record import lock

RUNNING, FINISHED, STOPPED, FAILED, DIED, NEVER = "running", "finished", "stopped", "failed", "died", "never started"
WINDOW, LATELY_S, TIMES = 20, 60.0, 5.0
FINE, GOES_ON, BAD = 0, 75, 1  # exit codes
TIMELINE, WAITS = "timeline", ("word", "uploads")  # as engine/timeline.py, which is not imported from here, has them
TIMELINE_ROUNDS = 10  # the last ones
TIMELINE_BYTES, RANK_BYTES = 1 << 22, 1 << 16  # at the ends of the files of all ranks together, and of one at most
FIGURES = 4  # that are shown
Facts = dict[str, Any]


def status(run: Path, now: float | None = None) -> Facts:
    """The facts of one run: JSON's types alone. What the directory does not tell is None.

    Beside those of `brief`: ranks, alive, lost (rank -> round), hosts, launcher, job, started; slowest; figures and
    figures_round; sent_bytes, received_bytes (rank 0's); faults; holder (who has, or had, the lock).
    """
    text = files.content(run / "metrics.jsonl")
    rows = _rows(text).rows
    figures, at = _figures(rows)
    return {
        **brief(run, text, now),
        "holder": lock.inspect(run)[1] or None,
        **_ranks(run),
        "slowest": slowest(run),
        "figures": figures,
        "figures_round": at,
        "sent_bytes": files.total(text, "sent_bytes"),
        "received_bytes": files.total(text, "received_bytes"),
        "faults": _faults(run, text, rows),
    }


def brief(run: Path, text: bytes | None = None, now: float | None = None) -> Facts:
    """directory, name; state, why, resume (whether `fedmpi resume` would go on); rounds_done, rounds, round_s, eta_s,
    since_s (what was written last, until now); checkpoint (round, age_s); unreadable (lines of metrics.jsonl).

    text: the content of metrics.jsonl.
    """
    now = time.time() if now is None else now
    text = files.content(run / "metrics.jsonl") if text is None else text
    parsed, lines_written = _rows(text), text.count(b"\n")
    done = parsed.rows[-1]["round"] + 1 if parsed.rows else max(lines_written - len(parsed.damaged), 0)
    identity, summary = files.json_of(run / "identity.json") or {}, files.json_of(run / "summary.json")
    is_locked, who = lock.inspect(run)
    written = files.changed([run / "metrics.jsonl", run / "log.txt", *(run / TIMELINE).glob("rank-*.jsonl")])
    round_s, rounds = _round_s(parsed.rows), _rounds(identity)
    lately = written is not None and now - written < LATELY_S + TIMES * (round_s or 0.0)
    state, why = _state(is_locked, lately, summary, lines_written, (done, rounds), bool(identity) or "host" in who)
    checkpoint = _checkpoint(run, now)
    left = max(rounds - done, 0) if rounds is not None else None
    return {
        "directory": str(run),
        "name": run.resolve().name,
        "state": state,
        "why": why,
        "resume": checkpoint is not None and state in (STOPPED, FAILED, DIED),
        "rounds_done": done,
        "rounds": rounds,
        "round_s": round_s,
        "eta_s": left * round_s if state == RUNNING and lately and left is not None and round_s is not None else None,
        "since_s": max(now - written, 0.0) if written is not None else None,
        "checkpoint": checkpoint,
        "unreadable": len(parsed.damaged),
    }


def code(facts: Facts) -> int:
    """The exit code: 0 running or finished, 75 it would go on, 1 failed, or nothing to go on from."""
    if facts["state"] in (RUNNING, FINISHED):
        return FINE
    return GOES_ON if facts["state"] in (STOPPED, DIED) and facts["resume"] else BAD


def _rows(text: bytes) -> JsonLines:
    """The last rows of metrics.jsonl."""
    if len(text) > files.TAIL:
        text = text[-files.TAIL :]
        text = text[text.find(b"\n") + 1 :]
    return parse_jsonl(text, rounds=True)


def _state(
    is_locked: bool | None,
    lately: bool,
    summary: Facts | None,
    lines: int,
    rounds: tuple[int, int | None],
    begun: bool,
) -> tuple[str, str]:
    """(state, why)"""
    reason = str((summary or {}).get("exit_reason", ""))
    ended = summary is not None and bool(reason)
    if is_locked and not (reason == "finished" and rounds[1] is not None and rounds[0] >= rounds[1]):
        late = "" if lately else "nothing written for longer than five rounds take; a rank may be silent"
        return RUNNING, late if lines else "it has not made a round yet"
    if ended:
        return _ended(reason)
    if is_locked is None and lately:
        return RUNNING, "" if begun and lines else "its directory was written lately"
    if not lines and not begun:
        return NEVER, "the directory holds nothing of a run"
    return DIED, "" if lines else "before its first round was complete"


def _ended(reason: str) -> tuple[str, str]:
    if reason == "finished" or reason.startswith("enough"):
        return FINISHED, reason.partition(": ")[2]
    if reason.startswith(("stopped", "signal ")):
        return STOPPED, reason if reason.startswith("signal") else "on request"
    return FAILED, reason.removeprefix("failed: ")


def _rounds(identity: Facts) -> int | None:
    try:
        rounds = ast.literal_eval(identity["rounds"])
    except (KeyError, ValueError, SyntaxError, TypeError):
        return None
    return rounds if isinstance(rounds, int) else None


def _round_s(rows: list[Facts]) -> float | None:
    """Mean seconds of the last rounds; the first one made stands only for itself."""
    walls = [row["wall_s"] for row in rows if _is_number(row.get("wall_s")) and row["round"] >= 0]
    later = walls[1:] if rows and rows[0]["round"] <= 0 else walls
    return fmean(later[-WINDOW:]) if later else walls[0] if walls else None


def _ranks(run: Path) -> Facts:
    about = files.json_of(run / "environment.json") or {}
    ranks = [each for each in about.get("ranks") or () if isinstance(each, dict)]
    lost: dict[str, int] = {}
    began = _job_began(run)
    for row in read_jsonl(run / "faults.jsonl", rounds=True).rows:
        if isinstance(row.get("ranks"), dict) and row["round"] >= began:
            lost |= dict.fromkeys(row["ranks"], row["round"])
    hosts = list(dict.fromkeys(str(each.get("host")) for each in ranks))
    alive = len(ranks) - sum(rank.isdigit() and int(rank) < len(ranks) for rank in lost)
    named = {"launcher": about.get("launcher"), "job": about.get("slurm_job_id"), "started": about.get("started")}
    return {"ranks": len(ranks) or None, "alive": alive if ranks else None, "lost": lost, "hosts": hosts, **named}


def _job_began(run: Path) -> int:
    """The first round of the last job, with which all ranks are there again."""
    text = files.content(run / TIMELINE / "rank-0000.jsonl")
    rows = parse_jsonl(text[max(text.rfind(b'{"job"'), 0) :], rounds=True).rows
    return next((row["round"] for row in rows), 0)


def _figures(rows: list[Facts]) -> tuple[dict[str, float], int | None]:
    """The figures of the last round that was evaluated, else of the last one; and which that is."""
    numbers = [{k: v for k, v in row.items() if k not in NOT_METRICS and _is_number(v)} for row in rows]
    names = {name for row in numbers for name in row if name != "train_loss"}
    for row, figures in zip(reversed(rows), reversed(numbers), strict=True):
        if names & figures.keys() or not names:
            return figures, row["round"]
    return {}, None


def _faults(run: Path, text: bytes, rows: list[Facts]) -> Facts:
    refused, clipped = (text.count(b'"%s": [{' % what) for what in (b"refused", b"clipped"))
    diverged = next((row["diverged"] for row in rows if "diverged" in row), None)
    losses = len(read_jsonl(run / "faults.jsonl", rounds=True).rows)
    return {"losses": losses, "rounds_with_refused": refused, "rounds_with_clipped": clipped, "diverged": diverged}


def _checkpoint(run: Path, now: float) -> Facts | None:
    paths = [path for path in (run / "checkpoints").glob("[0-9]*.safetensors") if path.stem.isdigit()]
    if not paths:
        return None
    newest = max(paths)
    written = files.changed([newest])
    return {"round": int(newest.stem), "age_s": None if written is None else max(now - written, 0.0)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# ---- who holds it up ----
def slowest(run: Path) -> Facts:
    """Who holds a run up, by the timelines of its last rounds, else by what clients were placed.

    {"client": {client, rank, seconds}, "rank": {rank, host, busy or pace}}, as far as it is known.

    A client's seconds are the median of its trainings; who trained with others at once is not known alone. The slowest
    rank is the one that waits least: `busy` is the share of its time in which it did not. pace: what a sample costs
    there, over what it costs on the fastest rank.
    """
    paths = sorted((run / TIMELINE).glob("rank-*.jsonl"))
    size = min(max(TIMELINE_BYTES // max(len(paths), 1), 1 << 12), RANK_BYTES)
    clients: dict[tuple[int, int], list[float]] = {}
    ranks: list[Facts] = []
    for path in paths:
        rank = path.stem.removeprefix("rank-")
        rows = [row for row in files.tail(path, size) if "spans" in row][-TIMELINE_ROUNDS:]
        if not rank.isdigit() or not rows:
            continue
        try:
            busy = _busy(rows, clients, int(rank))
        except (KeyError, TypeError, ValueError):  # not as fedmpi writes them
            continue
        if busy is not None:
            ranks.append({"rank": int(rank), "busy": busy})
    facts: Facts = {}
    if clients:
        (client, rank_), seconds = max(clients.items(), key=lambda item: median(item[1]))
        facts["client"] = {"client": client, "rank": rank_, "seconds": median(seconds)}
    if len(ranks) > 1:
        facts["rank"] = max(ranks, key=lambda each: each["busy"])
    return facts if "rank" in facts else facts | _by_pace(run)


def _busy(rows: list[Facts], clients: dict[tuple[int, int], list[float]], rank: int) -> float | None:
    waited = total = 0.0
    for row in rows:
        total += row["s"]
        for what, _, ms, *who in row["spans"]:
            waited += ms / 1e3 if what in WAITS else 0.0
            if what == "train" and who and isinstance(who[0], int):
                clients.setdefault((who[0], rank), []).append(ms / 1e3)
        rest: Mapping[str, float] = row.get("rest", {})
        waited += sum(ms for what, ms in rest.items() if what in WAITS) / 1e3
    return max(1 - waited / total, 0.0) if total > 0 else None


def _by_pace(run: Path) -> Facts:
    for row in reversed(files.tail(run / "placement.jsonl")):
        pace = row.get("pace")
        if isinstance(pace, dict) and len(pace) > 1 and all(isinstance(each, int) for each in pace.values()):
            rank = max(pace, key=lambda each: pace[each])
            return {"rank": {"rank": int(rank), "pace": pace[rank] / 100}} if rank.isdigit() else {}
    return {}


# ---- what is shown ----
def lines(facts: Facts) -> list[str]:
    """What `fedmpi status` shows of a run: a line a thing, none longer than a narrow terminal needs."""
    rows = [
        ("run", facts["directory"]),
        ("state", _state_text(facts)),
        ("round", _rounds_text(facts)),
        ("left", _left_text(facts)),
        ("ranks", _ranks_text(facts)),
        ("slowest", _slowest_text(facts["slowest"])),
        ("figures", _figures_text(facts)),
        ("bytes", _traffic_text(facts)),
        ("faults", _faults_text(facts)),
        ("checkpoint", _checkpoint_text(facts)),
        ("next", f"fedmpi resume {facts['directory']}" if facts["resume"] else ""),
    ]
    return [f"{name:<10}  {text}" for name, text in rows if text]


def _state_text(facts: Facts) -> str:
    why = f": {facts['why']}" if facts["why"] else ""
    who, since = facts["holder"], facts["since_s"]
    if facts["state"] == RUNNING and who and "host" in who:
        why += f" (process {who.get('pid')} on {who['host']})"
    ago = f", last written {duration(since)} ago" if since is not None and facts["state"] != FINISHED else ""
    return f"{facts['state']}{why}{ago}"


def _rounds_text(facts: Facts) -> str:
    if facts["state"] == NEVER:
        return ""
    of = f" of {facts['rounds']:,}" if facts["rounds"] is not None else ""
    pace = f", {duration(facts['round_s'])} a round" if facts["round_s"] is not None else ""
    return f"{facts['rounds_done']:,}{of}{pace}"


def _left_text(facts: Facts) -> str:
    if facts["eta_s"] is None:
        return ""
    end = time.localtime(time.time() + facts["eta_s"])
    day = "" if facts["eta_s"] < 12 * 3600 else "%Y-%m-%d "
    rough = " (by one round)" if facts["rounds_done"] == 1 else ""
    return f"{duration(facts['eta_s'])}{rough}, until {time.strftime(f'{day}%H:%M', end)}"


def _ranks_text(facts: Facts) -> str:
    if facts["ranks"] is None:
        return ""
    lost = ", ".join(f"rank {rank} lost in round {t}" for rank, t in facts["lost"].items())
    alive = f"{facts['alive']} of {facts['ranks']} alive" if facts["state"] == RUNNING else f"{facts['ranks']}"
    where = f" on {count(len(facts['hosts']), 'host')}" if facts["hosts"] else ""
    job = f", Slurm job {facts['job']}" if facts["job"] else ""
    return f"{alive}{where}{job}{f'; {lost}' if lost else ''}"


def _slowest_text(slow: Facts) -> str:
    parts = []
    if "client" in slow:
        one = slow["client"]
        parts.append(f"client {one['client']}, {duration(one['seconds'])} on rank {one['rank']}")
    if "rank" in slow:
        one = slow["rank"]
        how = f"busy {100 * one['busy']:.0f} % of the time" if "busy" in one else f"{one['pace']:.2f} x the fastest"
        parts.append(f"rank {one['rank']}, {how}")
    return "; ".join(parts)


def _figures_text(facts: Facts) -> str:
    figures = facts["figures"]
    if not figures:
        return ""
    first = [name for name in figures if name.endswith(("accuracy", "loss")) or name == "train_loss"]
    names = list(dict.fromkeys([*(n for n in ("loss", "accuracy", "train_loss") if n in figures), *first, *figures]))
    text = ", ".join(f"{name} {format_metric(name, figures[name], 4)}" for name in names[:FIGURES])
    return f"{text} (round {facts['figures_round'] + 1})"


def _traffic_text(facts: Facts) -> str:
    up, down = facts["received_bytes"], facts["sent_bytes"]
    return f"{size_text(up)} up, {size_text(down)} down (rank 0's connection)" if up or down else ""


def _faults_text(facts: Facts) -> str:
    faults, parts = facts["faults"], []
    if faults["losses"]:
        parts.append(f"{faults['losses']} x ranks lost (faults.jsonl)")
    for key, what in (("rounds_with_refused", "refused"), ("rounds_with_clipped", "clipped")):
        if faults[key]:
            parts.append(f"uploads {what} in {count(faults[key], 'round')}")
    if faults["diverged"] is not None:
        parts.append(f"training came apart from round {faults['diverged']} on")
    if facts["unreadable"]:
        parts.append(f"{count(facts['unreadable'], 'line')} of metrics.jsonl cannot be read")
    return "; ".join(parts) or "none"


def _checkpoint_text(facts: Facts) -> str:
    checkpoint = facts["checkpoint"]
    if checkpoint is None:
        return "none"
    age = f", {duration(checkpoint['age_s'])} old" if checkpoint["age_s"] is not None else ""
    return f"after round {checkpoint['round'] + 1}{age}"
