"""What `fedmpi status` and `fedmpi sweep --status` show of a sweep: a line for each run not done, then counts."""

from __future__ import annotations

from typing import Any

from fedmpi.common.text import brief, count
from fedmpi.runtime.reading.many import STATES, WAITING
from fedmpi.runtime.reading.status import FINISHED
from fedmpi.runtime.record.progress import duration

MOST, WHY = 40, 200  # lines a state; letters of a reason


def lines(facts: dict[str, Any]) -> list[str]:
    runs, said = facts["runs"], []
    for state in dict.fromkeys([*(run["state"] for run in runs)]):
        those = [run for run in runs if run["state"] == state]
        if state == FINISHED:
            continue
        said += [_line(run) for run in those[:MOST]]
        said += [f"... and {len(those) - MOST} more: {state}"] if len(those) > MOST else []
    counts = ", ".join(f"{facts['counts'][state]} {state}" for state in STATES[1:] if facts["counts"][state])
    said.append(f"{facts['counts'][FINISHED]} of {count(len(runs), 'run')} done{f'; {counts}' if counts else ''}")
    if facts["eta_s"] is not None:
        said.append(f"about {duration(facts['eta_s'])} left")
    return said


def _line(run: dict[str, Any]) -> str:
    if run["state"] == WAITING:
        return f"{run['name']}: {WAITING}"
    of = f" of {run['rounds']}" if run["rounds"] is not None else ""
    made = f", {run['rounds_done']}{of} rounds" if run["rounds_done"] or of else ""
    left = f", {duration(run['eta_s'])} left" if run["eta_s"] else ""
    why = f": {brief(' '.join(run['why'].split()), WHY)}" if run["why"] else ""
    return f"{run['name']}: {run['state']}{made}{left}{why}"
