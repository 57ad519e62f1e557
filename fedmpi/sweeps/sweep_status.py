"""`fedmpi status` for a sweep, which is given by its file or by the directory of its runs with sweep.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.formatting import format_duration
from fedmpi.common.redaction import MARK
from fedmpi.common.text import pluralize, shorten
from fedmpi.runtime.inspection import run_files
from fedmpi.runtime.inspection import status as run_status
from fedmpi.runtime.inspection.run_files import SWEEP_FILE
from fedmpi.runtime.inspection.status import DIED, FAILED, FINISHED, NEVER_STARTED, RUNNING, STOPPED
from fedmpi.sweeps import slurm
from fedmpi.sweeps.expand import Sweep, is_sweep_file, load_sweep

WAITING = "waiting"
STATES = (FINISHED, RUNNING, STOPPED, FAILED, DIED, WAITING)
StatusDict = dict[str, Any]


def read_sweep_list(place: Path) -> tuple[Path, list[str]]:
    """Return the sweep file and the overrides that sweep.json in the directory of the runs names.

    Raises:
        UserError: if there is no sweep.json, a secret was left out of it, or the sweep file is missing.
    """
    content = run_files.read_json_object(place / SWEEP_FILE) or {}
    file, given = content.get("file"), content.get("overrides")
    if not isinstance(file, str) or not isinstance(given, list):
        raise UserError(f"{place} holds no {SWEEP_FILE} that names a sweep; give the sweep's YAML file")
    if any(MARK in text for text in given):
        raise UserError(f"{place / SWEEP_FILE} leaves out a secret of the command line; give the sweep's file and all")
    here = place.resolve()
    if not Path(file).is_file():
        raise UserError(f"{place / SWEEP_FILE}: {file}, of which these runs are, does not exist; give the file itself")
    return Path(file), [*map(str, given), f"output={json.dumps(str(here.parent))}", f"name={json.dumps(here.name)}"]


def read_listed_runs(place: Path) -> list[str]:
    names = (run_files.read_json_object(place / SWEEP_FILE) or {}).get("runs")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_status(where: Path) -> tuple[StatusDict, list[str], int]:
    """Return the status of a run or of a sweep: as a dict, as lines of text, and as an exit code.

    Args:
        where: a run directory, the directory of a sweep's runs, or a sweep file.
    """
    if where.is_file() and where.suffix in (".yaml", ".yml"):
        if not is_sweep_file(where):
            raise UserError(f"{where} asks for one run, which lies in a directory: fedmpi status runs/NAME")
        facts = read_sweep_status(load_sweep(where))
    elif run_files.is_run_dir(run_files.check_directory(where)) or not (
        read_listed_runs(where) or run_files.list_runs(where)
    ):
        if not run_files.is_run_dir(where) and not (where / "lock").exists() and any(where.iterdir()):
            raise run_files.not_a_run_error(where, f"{' or '.join(run_files.RUN_FILES)}, and no directory that does")
        facts = run_status.read_run_status(where)
        return facts, run_status.format_status(facts), run_status.status_exit_code(facts)
    else:
        facts = read_directory_status(where)
    return facts, format_status(facts), exit_code(facts)


def read_directory_status(place: Path) -> StatusDict:
    """Return the status of all runs that sweep.json lists, and of all further runs in the directory."""
    names = dict.fromkeys([*read_listed_runs(place), *(run.name for run in run_files.list_runs(place))])
    return _build_sweep_status(place, [_read_run_status(place, name) for name in names])


def read_sweep_status(sweep: Sweep) -> StatusDict:
    """Return the status of all known runs of a sweep, including those with chosen candidates.

    Raises:
        UserError: if a directory contains a run with other settings.
    """
    every = sweep.known_runs()
    place = every[0].output
    jobs, runs = slurm.list_queued_runs(place), []
    for settings in every:
        facts = _read_run_status(place, settings.name)
        if sweep.needs_no_training(settings):
            facts["state"] = FINISHED
        elif facts["state"] == FINISHED:
            facts |= {"state": STOPPED, "why": f"the sweep asks for {settings.rounds} rounds"}
        runs.append({**facts, "rounds": settings.rounds, "job": jobs.get(settings.name)})
    return _build_sweep_status(place, runs)


def show_status(sweep: Sweep, say: Callable[[str], None]) -> int:
    """Show the chosen candidates, a line for each run that has begun and is not done, and the runs per state.

    Returns:
        The number of runs that are missing.
    """
    for choice in sweep.tuning_choices().values():
        assert sweep.tuning is not None
        say(f"chosen by {sweep.tuning.metric_name}: {choice}")
    facts = read_sweep_status(sweep)
    for line in format_status(facts):
        say(line)
    unknown = sum(settings is None for _, settings in sweep.final_runs())
    return len(facts["runs"]) - facts["counts"][FINISHED] + unknown


def exit_code(facts: StatusDict) -> int:
    """Return the exit code: 1 if a run failed or cannot be resumed, 75 if runs are missing and none is active, or 0."""
    if any(
        run["state"] in (FAILED, NEVER_STARTED) or (run["state"] == DIED and not run["resume"]) for run in facts["runs"]
    ):
        return run_status.FAILURE
    rest = sum(facts["counts"][state] for state in (STOPPED, DIED, WAITING))
    return run_status.RESUMABLE if rest and not facts["counts"][RUNNING] else run_status.SUCCESS


def _read_run_status(place: Path, name: str) -> StatusDict:
    """Return the status of one run, which its console log shows if the run failed before it made its directory."""
    run, log = place / name, place / f"{name}.log"
    facts: StatusDict = {"directory": str(run), "name": name, "state": WAITING, "why": "", "resume": False}
    facts |= dict.fromkeys(("rounds", "round_s", "eta_s", "checkpoint")) | {"rounds_done": 0}
    facts |= run_status.read_brief_status(run) if run.is_dir() else {}
    last_line = run_files.find_error_line(log)
    if facts["state"] in (WAITING, NEVER_STARTED, DIED) and "error" in last_line:
        return {**facts, "state": FAILED, "why": last_line.partition("error: ")[2] or last_line}
    if facts["state"] == WAITING and log.exists():
        return {**facts, "state": RUNNING, "why": "it begins"}
    return facts


def _build_sweep_status(place: Path, runs: list[StatusDict]) -> StatusDict:
    counts = {state: sum(run["state"] == state for run in runs) for state in STATES}
    counts[DIED] += sum(run["state"] == NEVER_STARTED for run in runs)
    return {"directory": str(place), "runs": runs, "counts": counts}


def format_status(facts: StatusDict) -> list[str]:
    """Return a line for each run that has begun or is queued and is not done, and a line with the runs per state."""
    runs, counts = facts["runs"], facts["counts"]
    shown = [_format_run(run) for run in runs if run["state"] not in (FINISHED, WAITING) or run.get("job")]
    states = "".join(f", {counts[state]} {state}" for state in STATES[1:] if counts[state])
    return [*shown, f"{counts[FINISHED]} of {pluralize(len(runs), 'run')} done{states}"]


def _format_run(run: StatusDict) -> str:
    parts = [f"{run['name']}: {run['state']}"]
    parts += [f"{run['rounds_done']} of {run['rounds']} rounds"] if run["rounds"] is not None else []
    parts += [f"job {run['job']}"] if run.get("job") else []
    parts += [f"{format_duration(run['eta_s'])} left"] if run["eta_s"] else []
    return ", ".join(parts) + (f": {shorten(' '.join(run['why'].split()), 200)}" if run["why"] else "")
