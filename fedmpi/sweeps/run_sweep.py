"""`fedmpi sweep`: train the missing runs of a sweep, check that all of them are done, or validate their settings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from fedmpi import models, tasks
from fedmpi.common import registry
from fedmpi.common.errors import RESTART_LATER, MissingDataError, UserError
from fedmpi.common.formatting import format_duration
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.text import choose_main_metric, format_metric, pluralize
from fedmpi.config import Settings
from fedmpi.runtime import build
from fedmpi.runtime.inspection import run_files
from fedmpi.runtime.record import atomic_files, lock
from fedmpi.runtime.record.summary import metric_names
from fedmpi.runtime.validate import validate_settings
from fedmpi.sweeps import pool, progress, sweep_status, tuning
from fedmpi.sweeps.expand import Sweep

FAILED, IN_USE = "failed", "elsewhere"
PrintLine = Callable[[str], None]


def run_sweep(sweep: Sweep, jobs: str, job: pool.TrainFunction, say: PrintLine) -> int:
    """Train the missing runs of a sweep; with `tune` first the tuning runs, then the runs with the chosen candidates.

    Args:
        jobs: the number of runs that train at the same time, or "auto".
        job: the function that trains one run in a child process.

    Returns:
        The exit code: 0 if all runs are done; 75 after a signal, or if another process trains some of the runs.

    Raises:
        UserError: if runs failed, after all others have ended.
    """
    every = [settings for _, settings in sweep.first_stage_runs()]
    todo = _find_missing_runs(sweep, every)  # may raise an error, so nothing is written before
    sweep.write_run_list(every[0].output, [settings.name for settings in every])
    code = _train_runs(sweep, every, todo, jobs, job, say, " to choose by" if sweep.tuning else "")
    if code or sweep.tuning is None:
        return code
    for line in write_choices(sweep):
        say(line)
    known = sweep.known_runs()
    sweep.write_run_list(every[0].output, [settings.name for settings in known])
    more = known[len(every) :]
    return (
        _train_runs(sweep, more, _find_missing_runs(sweep, more), jobs, job, say, " with what was chosen")
        if more
        else 0
    )


def _find_missing_runs(sweep: Sweep, runs: Sequence[Settings]) -> list[Settings]:
    return [settings for settings in runs if not sweep.needs_no_training(settings)]


def write_choices(sweep: Sweep) -> list[str]:
    """Write the chosen candidates to tuning.json, and return a line about each choice.

    Raises:
        UserError: if no candidate can be chosen for a cell.
    """
    assert sweep.tuning is not None
    choices, place = sweep.tuning_choices(), next(sweep.first_stage_runs())[1].output
    content = json.dumps(to_jsonable(tuning.choices_to_dict(sweep.tuning, choices)), indent=2) + "\n"
    atomic_files.write_atomically(place / tuning.CHOICES_FILE, content.encode())
    if without := [str(each) for each in choices.values() if each.chosen is None]:
        raise UserError(f"tune: {'; '.join(without)}; the candidates are in {place / tuning.CHOICES_FILE}")
    return [f"chosen by {sweep.tuning.metric_name}: {each}" for each in choices.values()]


def _train_runs(
    sweep: Sweep,
    every: Sequence[Settings],
    todo: Sequence[Settings],
    jobs: str,
    job: pool.TrainFunction,
    say: PrintLine,
    what: str,
) -> int:
    """Train the runs in `todo`, which are those of `every` that are not done, and return the exit code.

    `what` describes the runs in the first line of the output.
    """
    done = len(every) - len(todo)
    say(f"{pluralize(len(every), 'run')}{what} in {every[0].output}" + (f", {done} of them done" if done else ""))
    if not todo:
        return 0
    failed, elsewhere, began = list[Settings](), list[Settings](), time.monotonic()

    def report_end(ended: pool.ActiveRun) -> None:
        outcome, text = _describe_outcome(sweep, ended)
        {FAILED: failed, IN_USE: elsewhere}.get(outcome, []).append(ended.settings)
        rest = len(todo) - workers.num_ended
        left = f"; about {format_duration((time.monotonic() - began) / workers.num_ended * rest)} left" if rest else ""
        say(f"[{done + workers.num_ended}/{len(every)}] {ended.settings.name}: {text} ({ended.elapsed_s:.0f} s){left}")

    workers = pool.ProcessPool(job, *pool.choose_parallelism(jobs, todo), report_end)
    complete = workers.run([progress.with_auto_resume(settings) for settings in todo])
    if failed:
        logs = "\n  ".join(str(pool.console_log_path(each)) for each in failed)
        raise UserError(f"{len(failed)} of {pluralize(len(every), 'run')} failed; what they said:\n  {logs}")
    if busy := _find_missing_runs(sweep, elsewhere):
        say(f"{pluralize(len(busy), 'run')} in use by another process; when that has ended: {sweep.command}")
    elif not complete:
        say(f"stopped; go on with: {sweep.command}")
    return RESTART_LATER if busy or not complete else 0


def _describe_outcome(sweep: Sweep, ended: pool.ActiveRun) -> tuple[str, str]:
    """Return the outcome of a run that has ended (FAILED, ELSEWHERE, or "" for all others), and a text about it."""
    settings, code = ended.settings, ended.process.exitcode
    state = progress.read_state(settings)
    is_locked, who = lock.inspect_lock(progress.run_directory(settings))
    if state.status == progress.DONE:
        pool.console_log_path(settings).unlink(missing_ok=True)  # log.txt in the run directory has the same content
        return "", _format_main_metric(state.summary.get("last", {})) or "done"
    if is_locked and who.get("pid") not in (None, ended.process.pid):
        return IN_USE, f"in use by process {who['pid']} on host {who.get('host')}, and left to it"
    if code == RESTART_LATER:
        return "", f"stopped after {pluralize(state.rounds, 'round')}"
    if sweep.needs_no_training(settings):
        return "", "has diverged, and is not chosen"
    last_line = run_files.find_error_line(pool.console_log_path(settings))
    return FAILED, f"FAILED (exit code {code}): {last_line or 'the process printed nothing'}"


def _format_main_metric(row: dict[str, Any]) -> str:
    """Format the main metric of a row with its name; "" if the row has none."""
    name = choose_main_metric(metric_names([row]))
    return f"{name.replace('_', ' ')} {format_metric(name, row[name], 4)}" if name and row.get(name) is not None else ""


def check_complete(sweep: Sweep, say: PrintLine) -> None:
    """Show the status of a sweep, and raise UserError unless all runs are done.

    With `tune`, tuning.json and the list of runs are written as well.
    """
    if missing := sweep_status.show_status(sweep, say):
        raise UserError(f"{pluralize(missing, 'run')} missing; go on with: {sweep.command}")
    if sweep.tuning is not None:
        write_choices(sweep)
        runs = sweep.known_runs()
        sweep.write_run_list(runs[0].output, [settings.name for settings in runs])


def validate_sweep(sweep: Sweep, say: PrintLine) -> None:
    """Check a sweep for `fedmpi validate`: the settings of all runs, and everything else, such as the data, for some.

    The latter are a few runs that together contain every label of every axis.

    Raises:
        UserError: if there is a mistake; the message names the run.
        MissingDataError: if data are missing and nothing else is wrong.
    """
    every = [settings for _, settings in sweep.first_stage_runs()]
    say(f"{pluralize(len(every), 'run')}, to be written to {every[0].output}")
    for axis in sweep.axes:
        used = [label for label in axis.choices if any(each[axis.name] == label for each in sweep.labels)]
        say(f"  {axis.name}: {', '.join(used)}")
    missing: UserError | None = None
    for settings in map(sweep.run_settings, sweep.covering_labels()):
        try:
            validate_settings(settings)
        except UserError as error:
            if not _is_missing_data(error):
                raise UserError(f"{error}\n  in the run {settings.name}") from error
            missing = missing or error
            build.make_method(settings)  # names and options can be checked without data
            for kind, chosen, key in ((models.KIND, settings.model, "model"), (tasks.KIND, settings.task, "task")):
                registry.make_component(kind, chosen, settings.key_origins(key))
    if missing:
        raise MissingDataError(f"{sweep.path}: nothing is wrong but that data are missing: {missing}") from missing
    say("ok")


def _is_missing_data(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, MissingDataError) or _is_missing_data(error.__cause__))
