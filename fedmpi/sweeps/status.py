"""`fedmpi status` of a sweep: by its file, or by its directory and the list of runs that it leaves there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.formatting import duration
from fedmpi.common.redaction import MARK
from fedmpi.common.text import count, shorten
from fedmpi.runtime.reading import files
from fedmpi.runtime.reading.files import SWEEP_LIST
from fedmpi.runtime.reading.status import (
    BAD,
    DIED,
    FAILED,
    FINE,
    FINISHED,
    GOES_ON,
    LATELY_S,
    NEVER,
    RUNNING,
    STOPPED,
)
from fedmpi.runtime.reading.status import brief as run_facts
from fedmpi.runtime.record.plugins import moved_with
from fedmpi.sweeps import progress, slurm
from fedmpi.sweeps.expand import Sweep

WAITING = "waiting"
MOST_LINES, MOST_LETTERS = 40, 200  # lines a state; letters of a reason
STATES = (FINISHED, RUNNING, STOPPED, FAILED, DIED, WAITING)
Facts = dict[str, Any]


def asked(place: Path) -> tuple[Path, list[str]]:
    """The file and the overrides of the sweep in a directory, wherever that lies now, and whatever it is called.
    Raises UserError."""
    found = files.json_of(place / SWEEP_LIST) or {}
    file, given = found.get("file"), found.get("overrides")
    if not isinstance(file, str) or not isinstance(given, list):
        raise UserError(f"{place} holds no {SWEEP_LIST} that names a sweep; give the sweep's YAML file")
    if any(MARK in text for text in given):
        raise UserError(
            f"{place / SWEEP_LIST}: a secret is left out of what was asked for; give the sweep's file and all of it"
        )
    here, path = place.resolve(), Path(file)
    if not path.is_file():  # it may have been moved together with the runs, whose settings are compared with its own
        moved = next(moved_with(here, file), None)
        if moved is None:
            said = f"{file}, of which these runs are, is not there any more"
            raise UserError(f"{place / SWEEP_LIST}: {said}; give the file itself")
        path = moved
    return path, [*map(str, given), f"output={json.dumps(str(here.parent))}", f"name={json.dumps(here.name)}"]


def recorded(place: Path) -> list[str]:
    names = (files.json_of(place / SWEEP_LIST) or {}).get("runs")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def of_folder(place: Path) -> Facts:
    """The runs that the sweep has listed, and all others that lie there."""
    names = dict.fromkeys([*recorded(place), *(run.name for run in files.runs_in(place))])
    return _facts(place, (_one(place, name) for name in names))


def of_file(sweep: Sweep) -> Facts:
    """The runs that are known by now: those that the file asks for, and those with what was chosen. Raises UserError
    where a directory holds a run with other settings."""
    every = list(sweep.known_runs())
    place = every[0].output
    jobs, runs = slurm.queued(place), []
    for settings in every:
        state, facts = progress.check_state(settings), _one(place, settings.name)
        if sweep.is_over(state):
            facts["state"] = FINISHED
        elif facts["state"] == FINISHED:
            facts |= {"state": STOPPED, "why": f"the sweep asks for {settings.rounds} rounds"}
        runs.append({**facts, "rounds": settings.rounds, "job": jobs.get(settings.name)})
    return _facts(place, runs)


def show(sweep: Sweep, say: Callable[[str], None]) -> int:
    """`fedmpi sweep --status`: what was chosen, a line for each run that is not done, and how many are in which state.

    Returns how many are missing.
    """
    for choice in sweep.choices().values():
        assert sweep.best is not None
        say(f"chosen by {sweep.best.figure}: {choice}")
    facts = of_file(sweep)
    for line in lines(facts):
        say(line)
    unknown = sum(settings is None for _, settings in sweep.final_runs())
    return len(facts["runs"]) - facts["counts"][FINISHED] + unknown


def code(facts: Facts) -> int:
    """The exit code: 1 where a run has failed or has nothing to go on from, 75 where nobody goes on, though some runs
    are not done, else 0."""
    if any(run["state"] in (FAILED, NEVER) or (run["state"] == DIED and not run["resume"]) for run in facts["runs"]):
        return BAD
    rest = sum(facts["counts"][state] for state in (STOPPED, DIED, WAITING))
    return GOES_ON if rest and not facts["counts"][RUNNING] else FINE


def _one(place: Path, name: str) -> Facts:
    """One run; of one that has failed before it had a directory, what its log says."""
    run, log = place / name, place / f"{name}.log"
    if run.is_dir():
        facts = run_facts(run)
    else:
        facts = {"directory": str(run), "name": name, "state": WAITING, "why": "", "resume": False}
        facts |= {"rounds_done": 0, "rounds": None, "round_s": None, "eta_s": None, "checkpoint": None}
    said, written = files.last_line(log), files.changed([log])
    if facts["state"] in (WAITING, NEVER, DIED) and "error" in said:
        return {**facts, "state": FAILED, "why": said.partition("error: ")[2] or said}
    if facts["state"] in (WAITING, NEVER) and written is not None:
        begins = time.time() - written < LATELY_S
        return {**facts, "state": RUNNING if begins else FAILED, "why": "it begins" if begins else f"see {log}"}
    return facts


def _facts(place: Path, found: Iterable[Facts]) -> Facts:
    runs = list(found)
    counts = {state: sum(run["state"] == state for run in runs) for state in STATES}
    counts[DIED] += sum(run["state"] == NEVER for run in runs)
    return {"directory": str(place), "runs": runs, "counts": counts, "eta_s": _eta_s(runs)}


def _eta_s(runs: list[Facts]) -> float | None:
    """Seconds until all are done: what is left of those that run, and as much for each that waits as a run takes on
    average, shared by as many at once as run now; none is known where nothing runs."""
    running = [run for run in runs if run["state"] == RUNNING]
    whole = [run["rounds"] * run["round_s"] for run in runs if run["rounds"] and run["round_s"]]
    if not running or not whole:
        return None
    left = [run["eta_s"] if run["eta_s"] is not None else fmean(whole) for run in running]
    waiting = sum(run["state"] == WAITING for run in runs)
    return max(max(left), (sum(left) + waiting * fmean(whole)) / len(running))


def lines(facts: dict[str, Any]) -> list[str]:
    """Return what is shown of a sweep: a line for each run that is not done, then how many are in which state."""
    runs, said = facts["runs"], []
    for state in dict.fromkeys([*(run["state"] for run in runs)]):
        those = [run for run in runs if run["state"] == state]
        if state == FINISHED:
            continue
        said += [_line(run) for run in those[:MOST_LINES]]
        said += [f"... and {len(those) - MOST_LINES} more: {state}"] if len(those) > MOST_LINES else []
    counts = ", ".join(f"{facts['counts'][state]} {state}" for state in STATES[1:] if facts["counts"][state])
    said.append(f"{facts['counts'][FINISHED]} of {count(len(runs), 'run')} done{f'; {counts}' if counts else ''}")
    if facts["eta_s"] is not None:
        said.append(f"about {duration(facts['eta_s'])} left")
    return said


def _line(run: dict[str, Any]) -> str:
    if run["state"] == WAITING and not run.get("job"):
        return f"{run['name']}: {WAITING}"
    of = f" of {run['rounds']}" if run["rounds"] is not None else ""
    made = f", {run['rounds_done']}{of} rounds" if run["rounds_done"] or of else ""
    made += f", job {run['job']}" if run.get("job") else ""
    left = f", {duration(run['eta_s'])} left" if run["eta_s"] else ""
    why = f": {shorten(' '.join(run['why'].split()), MOST_LETTERS)}" if run["why"] else ""
    return f"{run['name']}: {run['state']}{made}{left}{why}"
