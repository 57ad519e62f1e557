"""Implement `fedmpi sweep`: train the missing runs of a sweep, check that all runs are finished, or validate them."""

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
from fedmpi.runtime import build_method
from fedmpi.runtime.inspection import run_files
from fedmpi.runtime.record import atomic_files, lock
from fedmpi.runtime.record.summary import metric_names
from fedmpi.runtime.validate import validate_settings
from fedmpi.sweeps import pool, progress, sweep_status, tuning
from fedmpi.sweeps.expand import Sweep

FAILED, IN_USE = "failed", "in use"  # outcomes of runs
PrintLine = Callable[[str], None]


def run_sweep(sweep: Sweep, jobs: str, train_run: pool.TrainFunction, print_line: PrintLine) -> int:
    """Train the missing runs of a sweep; with `tune`, first the tuning runs, then the final runs.

    Args:
        jobs: the number of runs that train at the same time, or "auto" for as many as this machine allows.
        train_run: trains one run in a child process.
        print_line: prints a line of progress.

    Returns:
        The exit code: 0 if all runs are finished; 75 if a signal stopped the sweep, or if another process is training
        some of the runs.

    Raises:
        UserError: if a run failed; the error is raised when all other runs have ended.
    """
    first_stage = [settings for _, settings in sweep.first_stage_runs()]
    todo = _find_missing_runs(sweep, first_stage)  # may raise an error, so nothing is written before
    sweep.write_run_list(first_stage[0].output, [settings.name for settings in first_stage])
    code = _train_runs(sweep, first_stage, todo, jobs, train_run, print_line, "tuning run" if sweep.tuning else "run")
    if code or sweep.tuning is None:
        return code
    for line in write_choices(sweep):
        print_line(line)
    known_runs = sweep.known_runs()
    sweep.write_run_list(first_stage[0].output, [settings.name for settings in known_runs])
    second_stage = known_runs[len(first_stage) :]
    return (
        _train_runs(
            sweep, second_stage, _find_missing_runs(sweep, second_stage), jobs, train_run, print_line, "final run"
        )
        if second_stage
        else 0
    )


def _find_missing_runs(sweep: Sweep, runs: Sequence[Settings]) -> list[Settings]:
    """Return those of `runs` that still need training."""
    return [settings for settings in runs if not sweep.needs_no_training(settings)]


def write_choices(sweep: Sweep) -> list[str]:
    """Choose candidates, write them to tuning.json, and return a line of text about each choice.

    Raises:
        UserError: if no candidate can be chosen for a cell.
    """
    assert sweep.tuning is not None
    choices, directory = sweep.tuning_choices(), next(sweep.first_stage_runs())[1].output
    content = json.dumps(to_jsonable(tuning.choices_to_dict(sweep.tuning, choices)), indent=2) + "\n"
    atomic_files.write_atomically(directory / tuning.CHOICES_FILE, content.encode())
    if unchosen := [str(choice) for choice in choices.values() if choice.chosen is None]:
        raise UserError(f"tune: {'; '.join(unchosen)}; for all candidates, see {directory / tuning.CHOICES_FILE}")
    return [f"chosen by {sweep.tuning.metric_name}: {choice}" for choice in choices.values()]


def _train_runs(
    sweep: Sweep,
    runs: Sequence[Settings],
    todo: Sequence[Settings],
    jobs: str,
    train_run: pool.TrainFunction,
    print_line: PrintLine,
    run_kind: str,
) -> int:
    """Train the runs in `todo`, that is, those of `runs` that are not finished, and return the exit code.

    run_kind: the name for one of these runs in the first line of output, such as "tuning run".
    """
    done = len(runs) - len(todo)
    print_line(f"{pluralize(len(runs), run_kind)} in {runs[0].output}" + (f", {done} of them done" if done else ""))
    if not todo:
        return 0
    failed, in_use, started_at = list[Settings](), list[Settings](), time.monotonic()

    def report_end(ended: pool.ActiveRun) -> None:
        outcome, text = _describe_outcome(sweep, ended)
        {FAILED: failed, IN_USE: in_use}.get(outcome, []).append(ended.settings)
        num_left = len(todo) - process_pool.num_ended
        left = (
            f"; about {format_duration((time.monotonic() - started_at) / process_pool.num_ended * num_left)} left"
            if num_left
            else ""
        )
        position = f"[{done + process_pool.num_ended}/{len(runs)}]"
        print_line(f"{position} {ended.settings.name}: {text} ({ended.elapsed_s:.0f} s){left}")

    process_pool = pool.ProcessPool(train_run, *pool.choose_parallelism(jobs, todo), report_end)
    complete = process_pool.run([progress.enable_auto_resume(settings) for settings in todo])
    if failed:
        logs = "\n  ".join(str(pool.get_console_log_path(each)) for each in failed)
        raise UserError(f"{len(failed)} of {pluralize(len(runs), 'run')} failed; their output is in\n  {logs}")
    if still_in_use := _find_missing_runs(sweep, in_use):
        print_line(
            f"{pluralize(len(still_in_use), 'run')} in use by another process; when it has ended, run: {sweep.command}"
        )
    elif not complete:
        print_line(f"stopped; to continue: {sweep.command}")
    return RESTART_LATER if still_in_use or not complete else 0


def _describe_outcome(sweep: Sweep, active_run: pool.ActiveRun) -> tuple[str, str]:
    """Return the outcome of a run whose process has ended (FAILED, IN_USE, or "" for any other) and a description."""
    settings, code = active_run.settings, active_run.process.exitcode
    state = progress.read_state(settings)
    is_locked, holder = lock.inspect_lock(progress.get_run_directory(settings))
    if state.status == progress.DONE:
        pool.get_console_log_path(settings).unlink(missing_ok=True)  # log.txt in the run directory has the same content
        return "", _format_main_metric(state.summary.get("last", {})) or "done"
    if is_locked and holder.get("pid") not in (None, active_run.process.pid):
        return IN_USE, f"in use by process {holder['pid']} on host {holder.get('host')}, skipped"
    if code == RESTART_LATER:
        return "", f"stopped after {pluralize(state.rounds, 'round')}"
    if sweep.needs_no_training(settings):
        return "", "diverged; this candidate is excluded"
    last_line = run_files.find_error_line(pool.get_console_log_path(settings))
    return FAILED, f"FAILED (exit code {code}): {last_line or 'the process printed nothing'}"


def _format_main_metric(row: dict[str, Any]) -> str:
    """Format the name and the value of the main metric in a row of metrics; "" if the row has none."""
    name = choose_main_metric(metric_names([row]))
    return f"{name.replace('_', ' ')} {format_metric(name, row[name], 4)}" if name and row.get(name) is not None else ""


def print_status_and_update_tuning(sweep: Sweep, print_line: PrintLine) -> None:
    """Print the status of a sweep and, with `tune`, update tuning.json and the list of runs.

    Raises:
        UserError: if a run is not finished.
    """
    if missing := sweep_status.show_status(sweep, print_line):
        raise UserError(f"{pluralize(missing, 'run')} missing; to train them: {sweep.command}")
    if sweep.tuning is not None:
        write_choices(sweep)
        runs = sweep.known_runs()
        sweep.write_run_list(runs[0].output, [settings.name for settings in runs])


def validate_sweep(sweep: Sweep, print_line: PrintLine) -> None:
    """Check a sweep without training (`fedmpi validate`).

    The settings of all runs are checked. Data, model and method are checked only for a few runs that together contain
    every label of every axis.

    Raises:
        UserError: if there is a mistake; the message names the run.
        MissingDataError: if data are missing and nothing else is wrong.
    """
    first_stage = [settings for _, settings in sweep.first_stage_runs()]
    print_line(f"{pluralize(len(first_stage), 'run')}, to be written to {first_stage[0].output}")
    for axis in sweep.axes:
        used_labels = [label for label in axis.choices if any(labels[axis.name] == label for labels in sweep.labels)]
        print_line(f"  {axis.name}: {', '.join(used_labels)}")
    missing_data_error: UserError | None = None
    for settings in map(sweep.run_settings, sweep.covering_labels()):
        try:
            validate_settings(settings)
        except UserError as error:
            if not _is_missing_data(error):
                raise UserError(f"{error}\n  in the run {settings.name}") from error
            missing_data_error = missing_data_error or error
            build_method.make_method(settings)  # names and options can be checked without data
            for kind, selection, key in ((models.KIND, settings.model, "model"), (tasks.KIND, settings.task, "task")):
                registry.make_component(kind, selection, settings.key_origins(key))
    if missing_data_error:
        raise MissingDataError(
            f"{sweep.path}: no errors were found, except that data are missing: {missing_data_error}"
        ) from missing_data_error
    print_line("ok")


def _is_missing_data(error: BaseException | None) -> bool:
    """Return whether an error was caused by missing data."""
    return error is not None and (isinstance(error, MissingDataError) or _is_missing_data(error.__cause__))
