"""Implement `fedmpi status` for a sweep, given its file or the directory of its runs, which contains sweep.json."""

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


def read_sweep_file_and_overrides(directory: Path) -> tuple[Path, list[str]]:
    """Return the path of a sweep file and its overrides, read from sweep.json in the directory of the runs.

    Raises:
        UserError: if there is no sweep.json, a secret was left out of it, or the sweep file does not exist.
    """
    content = run_files.read_json_object(directory / SWEEP_FILE) or {}
    sweep_file, overrides = content.get("file"), content.get("overrides")
    if not isinstance(sweep_file, str) or not isinstance(overrides, list):
        raise UserError(
            f"{directory} contains no valid {SWEEP_FILE}; give the sweep's YAML file instead of the directory"
        )
    if any(MARK in text for text in overrides):
        raise UserError(
            f"{directory / SWEEP_FILE} does not contain a secret of the original command line; give the sweep's YAML "
            "file and all its overrides"
        )
    resolved = directory.resolve()
    if not Path(sweep_file).is_file():
        raise UserError(
            f"{directory / SWEEP_FILE}: the sweep file {sweep_file} does not exist any more; give the path of the "
            "sweep file instead of the directory"
        )
    return Path(sweep_file), [
        *map(str, overrides),
        f"output={json.dumps(str(resolved.parent))}",
        f"name={json.dumps(resolved.name)}",
    ]


def read_listed_runs(directory: Path) -> list[str]:
    """Return the names of the runs that sweep.json lists; [] if there is no sweep.json."""
    names = (run_files.read_json_object(directory / SWEEP_FILE) or {}).get("runs")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_status(where: Path) -> tuple[StatusDict, list[str], int]:
    """Return the status of a run or of a sweep as a dict, as lines of text, and as an exit code.

    Args:
        where: a run directory, the directory of a sweep's runs, or a sweep file.

    Raises:
        UserError: if `where` is none of these.
    """
    if where.is_file() and where.suffix in (".yaml", ".yml"):
        if not is_sweep_file(where):
            raise UserError(f"{where} is the config of a single run; give its run directory: fedmpi status runs/NAME")
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
    return facts, format_status(facts), choose_exit_code(facts)


def read_directory_status(directory: Path) -> StatusDict:
    """Return the status of a sweep: of all runs that its sweep.json lists, and of all other runs in its directory."""
    names = dict.fromkeys([*read_listed_runs(directory), *(run.name for run in run_files.list_runs(directory))])
    return _build_sweep_status(directory, [_read_run_status(directory, name) for name in names])


def read_sweep_status(sweep: Sweep) -> StatusDict:
    """Return the status of a sweep: of all runs of the first stage, and of the final runs that are known.

    Raises:
        UserError: if the directory of a run contains a run with other settings.
    """
    every = sweep.known_runs()
    directory = every[0].output
    jobs, runs = slurm.list_queued_runs(directory), []
    for settings in every:
        facts = _read_run_status(directory, settings.name)
        if sweep.needs_no_training(settings):
            facts["state"] = FINISHED
        elif facts["state"] == FINISHED:
            facts |= {"state": STOPPED, "why": f"the sweep has rounds: {settings.rounds}"}
        runs.append({**facts, "rounds": settings.rounds, "job": jobs.get(settings.name)})
    return _build_sweep_status(directory, runs)


def show_status(sweep: Sweep, print_line: Callable[[str], None]) -> int:
    """Print the status of a sweep: chosen candidates, a line for each unfinished run, and the number of runs per state.

    Returns:
        The number of runs that are not finished.
    """
    for choice in sweep.tuning_choices().values():
        assert sweep.tuning is not None
        print_line(f"chosen by {sweep.tuning.metric_name}: {choice}")
    facts = read_sweep_status(sweep)
    for line in format_status(facts):
        print_line(line)
    unknown = sum(settings is None for _, settings in sweep.final_runs())
    return len(facts["runs"]) - facts["counts"][FINISHED] + unknown


def choose_exit_code(facts: StatusDict) -> int:
    """Return the exit code of `fedmpi status` for a sweep.

    It is 1 if a run failed or cannot be resumed, otherwise 75 if runs are unfinished and none is running, otherwise 0.
    """
    if any(
        run["state"] in (FAILED, NEVER_STARTED) or (run["state"] == DIED and not run["resume"]) for run in facts["runs"]
    ):
        return run_status.FAILURE
    rest = sum(facts["counts"][state] for state in (STOPPED, DIED, WAITING))
    return run_status.RESUMABLE if rest and not facts["counts"][RUNNING] else run_status.SUCCESS


def _read_run_status(directory: Path, name: str) -> StatusDict:
    """Return the status of one run; a run that failed before it created its directory has only a console log."""
    run, log = directory / name, directory / f"{name}.log"
    facts: StatusDict = {"directory": str(run), "name": name, "state": WAITING, "why": "", "resume": False}
    facts |= dict.fromkeys(("rounds", "round_s", "eta_s", "checkpoint")) | {"rounds_done": 0}
    facts |= run_status.read_brief_status(run) if run.is_dir() else {}
    last_line = run_files.find_error_line(log)
    if facts["state"] in (WAITING, NEVER_STARTED, DIED) and "error" in last_line:
        return {**facts, "state": FAILED, "why": last_line.partition("error: ")[2] or last_line}
    if facts["state"] == WAITING and log.exists():
        return {**facts, "state": RUNNING, "why": "starting"}
    return facts


def _build_sweep_status(directory: Path, runs: list[StatusDict]) -> StatusDict:
    counts = {state: sum(run["state"] == state for run in runs) for state in STATES}
    counts[DIED] += sum(run["state"] == NEVER_STARTED for run in runs)
    return {"directory": str(directory), "runs": runs, "counts": counts}


def format_status(facts: StatusDict) -> list[str]:
    """Return a line for each run that is unfinished or queued, and a line with the number of runs per state."""
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
