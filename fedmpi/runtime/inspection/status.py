"""Determine the state and progress of a run from the files in its directory (`fedmpi status`).

running           a job has locked the directory; or the file system has no locks, but a file was written recently
finished          all rounds are complete, or evaluate.best.patience ended the run
stopped           a signal or a time limit ended the run; `fedmpi resume` continues it
failed            the run ended with an error, which summary.json contains
died              no job uses the directory, and no end was recorded: the run was killed, or power failed
never started     the run ended before it wrote anything, or has not started yet
"""

from __future__ import annotations

import ast
import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmpi.common.formatting import format_duration, format_table
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.jsonl import JsonLines, read_jsonl
from fedmpi.common.metrics_row import NON_METRIC_NAMES
from fedmpi.common.text import format_metric, pluralize
from fedmpi.runtime.inspection import run_files
from fedmpi.runtime.record import lock

RUNNING, FINISHED, STOPPED, FAILED, DIED, NEVER_STARTED = (
    "running",
    "finished",
    "stopped",
    "failed",
    "died",
    "never started",
)
# Rounds over which round_s is averaged. A run has written recently if its last write is at most RECENT_S seconds plus
# the duration of RECENT_ROUNDS rounds ago.
AVERAGED_ROUNDS, RECENT_S, RECENT_ROUNDS = 20, 60.0, 5.0
SUCCESS, RESUMABLE, FAILURE = 0, 75, 1  # exit codes
MAX_METRICS_SHOWN = 4  # largest number of metrics that are printed
Facts = dict[str, Any]


def read_run_status(run: Path, now: float | None = None) -> Facts:
    """Return the state and progress of one run, as a dict of JSON values; unknown values are None.

    Args:
        now: the time in seconds since 1970; None: the current time.

    Returns:
        The values of `read_brief_status`, and: ranks (number of ranks), lost (failed rank -> round), hosts, launcher,
        job (Slurm job id), started (start time); metrics (of round metrics_round); sent_bytes, received_bytes (of
        rank 0 in all rounds); faults (counts); holder (process that has or had the directory's lock).
    """
    lines = read_jsonl(run / "metrics.jsonl", need_round=True)
    rows, (metrics, metrics_round) = lines.rows, _latest_metrics(lines.rows)
    about = run_files.read_json_object(run / "environment.json") or {}
    ranks = [each for each in about.get("ranks") or () if isinstance(each, dict)]
    faults = read_jsonl(run / "faults.jsonl", need_round=True).rows
    faults = [row for row in faults if isinstance(row.get("ranks"), dict)]
    return {
        **read_brief_status(run, lines, now),
        "holder": lock.inspect_lock(run)[1] or None,
        "ranks": len(ranks) or None,
        "lost": {rank: row["round"] for row in faults for rank in row["ranks"]},
        "hosts": list(dict.fromkeys(str(each.get("host")) for each in ranks)),
        "launcher": about.get("launcher"),
        "job": about.get("slurm_job_id"),
        "started": about.get("started"),
        "metrics": metrics,
        "metrics_round": metrics_round,
        "sent_bytes": sum(row.get("sent_bytes", 0) for row in rows),
        "received_bytes": sum(row.get("received_bytes", 0) for row in rows),
        "faults": {
            "rank_failures": len(faults),
            "rounds_with_refused": sum(bool(row.get("refused")) for row in rows),
            "diverged": next((row["diverged"] for row in rows if "diverged" in row), None),
        },
    }


def read_brief_status(run: Path, lines: JsonLines | None = None, now: float | None = None) -> Facts:
    """Return the main facts about one run: its state, its progress and its newest checkpoint.

    Args:
        lines: the content of metrics.jsonl; None: read the end of the file.
        now: the time in seconds since 1970; None: the current time.

    Returns:
        A dict: directory, name; state, why (reason for the state), resume (whether `fedmpi resume` can continue the
        run); rounds_done, rounds (completed and total); round_s (mean seconds per round, of the last AVERAGED_ROUNDS),
        eta_s (seconds until the end), since_s (seconds since the last write); checkpoint (round and age_s, seconds
        since it was written); unreadable (number of damaged lines in metrics.jsonl).
    """
    now = time.time() if now is None else now
    lines = (
        read_jsonl(run / "metrics.jsonl", need_round=True, tail_bytes=run_files.TAIL_BYTES) if lines is None else lines
    )
    done = lines.rows[-1]["round"] + 1 if lines.rows else 0
    identity, summary = (
        run_files.read_json_object(run / "identity.json") or {},
        run_files.read_json_object(run / "summary.json") or {},
    )
    run_files.check_written_by_this_version(run, identity)
    rounds, round_s = _planned_rounds(identity), _mean_round_seconds(lines.rows)
    written = run_files.find_last_modified([run / "metrics.jsonl", run / "log.txt", *run.glob("trace/rank-*.jsonl")])
    is_late = written is None or now - written >= RECENT_S + RECENT_ROUNDS * (round_s or 0.0)
    is_locked, who = lock.inspect_lock(run)
    reason = str(summary.get("exit_reason", ""))
    is_over = reason == "finished" and rounds is not None and done >= rounds
    if is_locked and not is_over:
        silent = "nothing was written for more than five rounds' time; a rank may hang" if is_late else ""
        state, why = RUNNING, silent if lines.rows else "it has not completed a round yet"
    elif reason:
        state, why = _classify_end(reason)
    elif is_locked is None and not is_late:
        state, why = RUNNING, "its directory was written to recently"
    elif lines.rows or identity or "host" in who:
        state, why = DIED, "" if lines.rows else "before its first round was complete"
    else:
        state, why = NEVER_STARTED, "the directory contains no files of a run"
    newest = max(run.glob("checkpoints/[0-9]*.safetensors"), default=None)
    times = run_files.find_last_modified([newest] if newest else []), written
    age, since = (None if t is None else max(now - t, 0.0) for t in times)
    has_eta = state == RUNNING and not is_late and rounds is not None and round_s is not None
    return {
        "directory": str(run),
        "name": run.resolve().name,
        "state": state,
        "why": why,
        "resume": newest is not None and state in (STOPPED, FAILED, DIED),
        "rounds_done": done,
        "rounds": rounds,
        "round_s": round_s,
        "eta_s": max((rounds or 0) - done, 0) * (round_s or 0.0) if has_eta else None,
        "since_s": since,
        "checkpoint": {"round": int(newest.stem), "age_s": age} if newest else None,
        "unreadable": len(lines.damaged_lines),
    }


def status_exit_code(facts: Facts) -> int:
    """Return the exit code for a run: 0 if running or finished, 75 if stopped or killed but resumable, else 1."""
    if facts["state"] in (RUNNING, FINISHED):
        return SUCCESS
    return RESUMABLE if facts["state"] in (STOPPED, DIED) and facts["resume"] else FAILURE


def _classify_end(reason: str) -> tuple[str, str]:
    if reason.startswith(("finished", "early_stopped", "budget_spent")):
        return FINISHED, reason.partition(": ")[2]
    if reason.startswith(("stopped", "signal ")):
        return STOPPED, reason if reason.startswith("signal") else "on request"
    return FAILED, reason.removeprefix("failed: ")


def _planned_rounds(identity: Facts) -> int | None:
    try:
        rounds = ast.literal_eval(identity["rounds"])
    except (KeyError, ValueError, SyntaxError, TypeError):
        return None
    return rounds if isinstance(rounds, int) else None


def _mean_round_seconds(rows: list[Facts]) -> float | None:
    """Return the mean seconds per round of the last rounds, without the slower first one unless it is the only one."""
    walls = [row["wall_s"] for row in rows if _is_number(row.get("wall_s")) and row["round"] >= 0]
    later = walls[1:] if rows and rows[0]["round"] <= 0 else walls
    return fmean(later[-AVERAGED_ROUNDS:] or walls) if walls else None


def _latest_metrics(rows: list[Facts]) -> tuple[dict[str, float], int | None]:
    """Return the metrics of the last evaluated round (or of the last round if none was evaluated), and the round."""
    numbers = [{k: v for k, v in row.items() if k not in NON_METRIC_NAMES and _is_number(v)} for row in rows]
    names = {name for row in numbers for name in row if name != "train_loss"}
    for row, metrics in zip(reversed(rows), reversed(numbers), strict=True):
        if names & metrics.keys() or not names:
            return metrics, row["round"]
    return {}, None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# ---- output ----
def format_status(facts: Facts) -> list[str]:
    """Return the lines that `fedmpi status` prints for one run."""
    who, since, checkpoint = facts["holder"], facts["since_s"], facts["checkpoint"]
    has_holder, is_finished = who and facts["state"] == RUNNING, facts["state"] == FINISHED
    up, down = (format_bytes(facts[key]) for key in ("received_bytes", "sent_bytes"))
    lost = [f"; rank {rank} lost in round {t}" for rank, t in facts["lost"].items()]
    metrics = facts["metrics"]
    first = [name for name in ("loss", "accuracy", "train_loss") if name in metrics]
    shown = [
        f"{k} {format_metric(k, metrics[k], 4)}" for k in list(dict.fromkeys([*first, *metrics]))[:MAX_METRICS_SHOWN]
    ]
    rows = {
        "run": [facts["directory"]],
        "state": [
            facts["state"],
            f": {facts['why']}" if facts["why"] else "",
            f" (process {who.get('pid')} on {who.get('host')})" if has_holder else "",
            f", last written {format_duration(since)} ago" if since is not None and not is_finished else "",
        ],
        "round": [
            f"{facts['rounds_done']:,}",
            f" of {facts['rounds']:,}" if facts["rounds"] is not None else "",
            f", {format_duration(facts['round_s'])} per round" if facts["round_s"] is not None else "",
            f", {format_duration(facts['eta_s'])} left" if facts["eta_s"] is not None else "",
        ],
        "ranks": [
            f"{facts['ranks']} on {pluralize(len(facts['hosts']), 'host')}",
            f", Slurm job {facts['job']}" if facts["job"] else "",
            *lost,
        ],
        "metrics": [", ".join(shown), f" (round {facts['metrics_round'] + 1})" if shown else ""],
        "bytes": [f"{up} up, {down} down (rank 0's connection)"],
        "faults": ["; ".join(_describe_faults(facts)) or "none"],
        "checkpoint": [
            f"after round {checkpoint['round'] + 1}" if checkpoint else "none",
            f", {format_duration(checkpoint['age_s'])} old" if checkpoint and checkpoint["age_s"] is not None else "",
        ],
        "next": [f"fedmpi resume {facts['directory']}" if facts["resume"] else ""],
    }
    if facts["ranks"] is None:
        del rows["ranks"]
    return format_table([(name, text) for name, parts in rows.items() if (text := "".join(parts))], "left")


def _describe_faults(facts: Facts) -> list[str]:
    faults, unreadable = facts["faults"], facts["unreadable"]
    parts = [f"{faults['rank_failures']} x ranks lost (faults.jsonl)"] if faults["rank_failures"] else []
    if rounds := faults["rounds_with_refused"]:
        parts.append(f"uploads refused in {pluralize(rounds, 'round')}")
    parts += [f"diverged from round {faults['diverged']} on"] if faults["diverged"] is not None else []
    return [*parts, f"{pluralize(unreadable, 'line')} of metrics.jsonl cannot be read"] if unreadable else parts
