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
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmpi.common.jsonl import JsonLines, parse_jsonl, read_jsonl
from fedmpi.common.metrics_row import NOT_METRICS
from fedmpi.runtime.reading import files, slowest
from fedmpi.runtime.record import lock

RUNNING, FINISHED, STOPPED, FAILED, DIED, NEVER = "running", "finished", "stopped", "failed", "died", "never started"
WINDOW, LATELY_S, TIMES = 20, 60.0, 5.0
FINE, GOES_ON, BAD = 0, 75, 1  # exit codes


def status(run: Path, now: float | None = None) -> dict[str, Any]:
    """The facts of one run: JSON's types alone. What the directory does not tell is None.

    Beside those of `brief`: ranks, alive, lost (rank -> round), hosts, launcher, job, started; slowest; figures and
    figures_round; sent_bytes, received_bytes (rank 0's); faults; holder (who has, or had, the lock).
    """
    text = files.content(run / "metrics.jsonl")
    rows = _rows(text).rows
    figures, at = _figures(rows)
    return {
        **brief(run, text, now),
        "holder": lock.look(run)[1] or None,
        **_ranks(run),
        "slowest": slowest.slowest(run),
        "figures": figures,
        "figures_round": at,
        "sent_bytes": files.total(text, "sent_bytes"),
        "received_bytes": files.total(text, "received_bytes"),
        "faults": _faults(run, text, rows),
    }


def brief(run: Path, text: bytes | None = None, now: float | None = None) -> dict[str, Any]:
    """directory, name; state, why, resume (whether `fedmpi resume` would go on); rounds_done, rounds, round_s, eta_s,
    since_s (what was written last, until now); checkpoint (round, age_s); unreadable (lines of metrics.jsonl).

    text: the content of metrics.jsonl.
    """
    now = time.time() if now is None else now
    text = files.content(run / "metrics.jsonl") if text is None else text
    seen, whole = _rows(text), text.count(b"\n")
    done = seen.rows[-1]["round"] + 1 if seen.rows else max(whole - len(seen.damaged), 0)
    identity, summary = files.json_of(run / "identity.json") or {}, files.json_of(run / "summary.json")
    held, who = lock.look(run)
    written = files.changed([run / "metrics.jsonl", run / "log.txt", *(run / slowest.FOLDER).glob("rank-*.jsonl")])
    round_s, rounds = _round_s(seen.rows), _rounds(identity)
    lately = written is not None and now - written < LATELY_S + TIMES * (round_s or 0.0)
    state, why = _state(held, lately, summary, whole, (done, rounds), bool(identity) or "host" in who)
    kept = _checkpoint(run, now)
    left = max(rounds - done, 0) if rounds is not None else None
    return {
        "directory": str(run),
        "name": run.resolve().name,
        "state": state,
        "why": why,
        "resume": kept is not None and state in (STOPPED, FAILED, DIED),
        "rounds_done": done,
        "rounds": rounds,
        "round_s": round_s,
        "eta_s": left * round_s if state == RUNNING and lately and left is not None and round_s is not None else None,
        "since_s": max(now - written, 0.0) if written is not None else None,
        "checkpoint": kept,
        "unreadable": len(seen.damaged),
    }


def code(facts: dict[str, Any]) -> int:
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
    held: bool | None,
    lately: bool,
    summary: dict[str, Any] | None,
    lines: int,
    rounds: tuple[int, int | None],
    begun: bool,
) -> tuple[str, str]:
    """(state, why)"""
    reason = str((summary or {}).get("exit_reason", ""))
    ended = summary is not None and bool(reason)
    if held and not (reason == "finished" and rounds[1] is not None and rounds[0] >= rounds[1]):
        late = "" if lately else "nothing written for longer than five rounds take; a rank may be silent"
        return RUNNING, late if lines else "it has not made a round yet"
    if ended:
        return _ended(reason)
    if held is None and lately:
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


def _rounds(identity: dict[str, Any]) -> int | None:
    try:
        found = ast.literal_eval(identity["rounds"])
    except (KeyError, ValueError, SyntaxError, TypeError):
        return None
    return found if isinstance(found, int) else None


def _round_s(rows: list[dict[str, Any]]) -> float | None:
    """Mean seconds of the last rounds; the first one made stands only for itself."""
    walls = [row["wall_s"] for row in rows if _is_number(row.get("wall_s")) and row["round"] >= 0]
    later = walls[1:] if rows and rows[0]["round"] <= 0 else walls
    return fmean(later[-WINDOW:]) if later else walls[0] if walls else None


def _ranks(run: Path) -> dict[str, Any]:
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
    text = files.content(run / slowest.FOLDER / "rank-0000.jsonl")
    rows = parse_jsonl(text[max(text.rfind(b'{"job"'), 0) :], rounds=True).rows
    return next((row["round"] for row in rows), 0)


def _figures(rows: list[dict[str, Any]]) -> tuple[dict[str, float], int | None]:
    """The figures of the last round that was evaluated, else of the last one; and which that is."""
    found = [{k: v for k, v in row.items() if k not in NOT_METRICS and _is_number(v)} for row in rows]
    names = {name for row in found for name in row if name != "train_loss"}
    for row, figures in zip(reversed(rows), reversed(found), strict=True):
        if names & figures.keys() or not names:
            return figures, row["round"]
    return {}, None


def _faults(run: Path, text: bytes, rows: list[dict[str, Any]]) -> dict[str, Any]:
    refused, clipped = (text.count(b'"%s": [{' % what) for what in (b"refused", b"clipped"))
    apart = next((row["diverged"] for row in rows if "diverged" in row), None)
    losses = len(read_jsonl(run / "faults.jsonl", rounds=True).rows)
    return {"losses": losses, "rounds_with_refused": refused, "rounds_with_clipped": clipped, "diverged": apart}


def _checkpoint(run: Path, now: float) -> dict[str, Any] | None:
    kept = [path for path in (run / "checkpoints").glob("[0-9]*.safetensors") if path.stem.isdigit()]
    if not kept:
        return None
    newest = max(kept)
    written = files.changed([newest])
    return {"round": int(newest.stem), "age_s": None if written is None else max(now - written, 0.0)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
