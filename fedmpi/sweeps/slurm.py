"""Submit the missing runs of a sweep to Slurm (`fedmpi sweep --sbatch`).

The runs form a job array, followed by a job that fails unless all runs are finished. A task of the array starts `fedmpi
sweep SWEEP --run NAME` with srun. A task that reaches its time limit asks Slurm to requeue it, and later continues in
the same run directory. The file slurm/submitted.jsonl next to the runs records which job trains which runs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize
from fedmpi.config import Settings
from fedmpi.runtime.inspection.run_files import read_last_rows
from fedmpi.sweeps.expand import Sweep

SLURM_FOLDER, SUBMITTED_FILE = "slurm", "submitted.jsonl"
SIGNAL_BEFORE_LIMIT_S = 120  # seconds before the time limit at which Slurm sends the stop signal
COMMAND_TIMEOUT_S = 30.0  # seconds to wait for a command of Slurm

ARRAY_SCRIPT = r"""#!/usr/bin/env bash
{options}
set -uo pipefail
cd {here}
names=(
{names}
)
name=${{names[$SLURM_ARRAY_TASK_ID]}}
me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
export FEDMPI_OUTCOME={folder}/outcome-$me SLURM_KILL_BAD_EXIT=${{SLURM_KILL_BAD_EXIT:-1}}
rm -f "$FEDMPI_OUTCOME"
code=0
srun --cpus-per-task={threads} --unbuffered {command} --run "$name" || code=$?
rank0_code='' new_rounds=1
read -r rank0_code new_rounds 2>/dev/null <"$FEDMPI_OUTCOME" || true
rm -f "$FEDMPI_OUTCOME"
code=${{rank0_code:-$code}}
[[ $code -ne 138 ]] || code=75  # the signal arrived before its handler was installed
[[ $code -eq 75 ]] || exit "$code"
job_state=$(scontrol show job "$me" 2>/dev/null) || true
if [[ $job_state != *JobState=RUNNING* && $job_state != *Reason=TimeLimit* ]]; then
    echo "$name: this job was ended by Slurm or a user; submit the sweep again to continue" >&2
elif [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 && $new_rounds -eq 0 ]]; then
    echo "$name: not requeued, because no round was finished since the last restart; set a longer --time" >&2
elif scontrol requeue "$me"; then
    echo "$name: job $me was requeued and will continue" >&2
fi
exit 75
"""


@dataclass(frozen=True)
class ArrayOptions:
    """Options of the Slurm job array that trains a sweep."""

    max_running: int | None = None  # number of tasks that Slurm runs at the same time; None: no limit
    gpus: int | None = None  # per rank
    ranks: int = 1  # per run
    options: tuple[str, ...] = ()  # other options of sbatch


def submit_sweep(sweep: Sweep, options: ArrayOptions, dry_run: bool, print_line: Callable[[str], None]) -> int:
    """Submit to Slurm all runs of a sweep that are neither finished nor queued.

    Args:
        dry_run: only print the commands, without submitting anything.
        print_line: prints a line of output.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if an option is invalid, or a Slurm command fails.
    """
    if invalid := [option for option in options.options if not option.startswith("-")]:
        raise UserError(
            f"--option: {invalid[0]!r} is not allowed; must be an option of sbatch, such as --option=--mem=8G"
        )
    first_stage = [settings for _, settings in sweep.first_stage_runs()]
    directory = first_stage[0].output.absolute()
    folder, queued = directory / SLURM_FOLDER, list_queued_runs(directory)
    missing = [settings.name for settings in first_stage if not sweep.needs_no_training(settings)]
    arrays = [[name for name in names if name not in queued] for names in (missing, _find_runs_after_tuning(sweep))]
    if not any(arrays):
        print_line(f"nothing to submit: {pluralize(len(queued), 'run')} in the queue, all others are finished")
        return 0
    if not dry_run:
        sweep.write_run_list(directory, [settings.name for settings in first_stage])
        folder.mkdir(exist_ok=True)
    threads, jobs = max(settings.compute.threads for settings in first_stage), list[str]()
    for names in filter(None, arrays):  # runs that wait for the choice of `tune` start when the tuning runs have ended
        dependency = [f"--dependency=afterany:{jobs[0]}"] if jobs else []
        jobs.append(
            _submit_job(dependency, build_array_script(sweep, options, names, directory, threads), dry_run, print_line)
        )
        if not dry_run:
            with (folder / SUBMITTED_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": jobs[-1], "names": names}) + "\n")
    other_jobs = {entry["job"] for entry in _read_submitted_jobs(directory) if set(entry["names"]) & set(queued)}
    end_arguments = [option for option in options.options if option.startswith(("--partition", "--account"))]
    end_arguments += [f"--job-name={directory.name}-end", "--ntasks=1", f"--output={folder}/end-%j.log"]
    end_arguments += [f"--dependency=afterany:{':'.join([*jobs, *sorted(other_jobs)])}"]
    end_arguments += [
        f"--wrap=cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*_build_sweep_command(sweep), '--check'])}"
    ]
    end_job = _submit_job(end_arguments, None, dry_run, print_line)
    if not dry_run:
        runs = pluralize(sum(map(len, arrays)), "run")
        print_line(f"{runs} in job {', '.join(jobs)}; job {end_job} fails if a run is missing at the end")
    return 0


def _find_runs_after_tuning(sweep: Sweep) -> list[str]:
    """Return the names of the runs that cannot start before candidates are chosen.

    The name of such a run does not yet contain the part that names its candidate.
    """
    plan, runs = sweep.tuning, sweep.final_runs() if sweep.tuning else []
    candidates = [(labels, settings) for labels, settings in runs if plan and not plan.is_tuning_run(labels)]
    return [
        sweep.run_name(labels)
        for labels, settings in candidates
        if settings is None or not sweep.needs_no_training(settings)
    ]


def build_array_script(sweep: Sweep, options: ArrayOptions, names: Sequence[str], directory: Path, threads: int) -> str:
    """Return the batch script of a Slurm job array in which each task trains one run of a sweep.

    Args:
        names: the names of the runs.
        directory: the directory that contains the run directories.
        threads: the number of threads per rank.
    """
    folder = directory / SLURM_FOLDER
    limit = f"%{options.max_running}" if options.max_running else ""
    sbatch_options = [
        f"--job-name={directory.name}",
        f"--array=0-{len(names) - 1}{limit}",
        f"--output={folder}/%A_%a.log",
    ]
    sbatch_options += ["--open-mode=append", "--requeue", f"--signal=USR1@{SIGNAL_BEFORE_LIMIT_S}"]
    sbatch_options += [f"--ntasks={options.ranks}", f"--cpus-per-task={threads}"]
    # --gpus-per-task would hide the GPU of each task from the others.
    sbatch_options += ["--nodes=1", f"--gpus-per-node={options.ranks * options.gpus}"] if options.gpus else []
    return ARRAY_SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in [*sbatch_options, *options.options]),
        here=shlex.quote(str(Path.cwd())),
        names="\n".join(map(shlex.quote, names)),
        folder=shlex.quote(str(folder)),
        threads=threads,
        command=shlex.join(_build_sweep_command(sweep)),
    )


def find_run_by_name(sweep: Sweep, name: str) -> Settings:
    """Return the settings of the run called `name`; the part of the name that stands for its candidate is optional.

    Raises:
        UserError: if no run has this name, or no candidate has been chosen for it yet.
    """
    for labels, settings in sweep.final_runs():
        if settings is None and sweep.tuning is not None and sweep.run_name(labels) == name:
            raise UserError(
                f"--run: {name} cannot start yet; tune: {sweep.tuning_choices()[sweep.tuning.get_cell_key(labels)]}"
            )
        if settings is not None and sweep.run_name(labels) == name:
            return settings
    for settings in sweep.known_runs():
        if settings.name == name:
            return settings
    raise UserError(f"--run: {sweep.path} has no run {name}; to list its runs: fedmpi sweep {sweep.path} --status")


def list_queued_runs(directory: Path) -> dict[str, str]:
    """Return {run name: job and state, such as "12_3 RUNNING"} for the runs that are queued or running in Slurm."""
    names = {
        (entry["job"], str(task)): name
        for entry in _read_submitted_jobs(directory)
        for task, name in enumerate(entry["names"])
    }
    try:
        output = _run_slurm_command("squeue", "--noheader", "--array", "--me", "--format=%F %K %T") if names else ""
    except UserError:
        return {}
    rows = [line.split() for line in output.splitlines()]
    return {names[job, task]: f"{job}_{task} {state}" for job, task, state in rows if (job, task) in names}


def _read_submitted_jobs(directory: Path) -> list[dict]:
    """Return the rows of submitted.jsonl: the number (`job`) and the runs (`names`) of each submitted job array."""
    rows = read_last_rows(directory / SLURM_FOLDER / SUBMITTED_FILE)
    return [row for row in rows if "job" in row and isinstance(row.get("names"), list)]


def _build_sweep_command(sweep: Sweep) -> list[str]:
    """Return the command that trains the sweep, including secrets."""
    return [sys.executable, "-m", "fedmpi", "sweep", str(sweep.path.absolute()), *sweep.all_overrides]


def _submit_job(arguments: Sequence[str], script: str | None, dry_run: bool, print_line: Callable[[str], None]) -> str:
    """Submit a job and return its number; if `dry_run`, only print the command."""
    if dry_run:
        print_line(f"sbatch {shlex.join(arguments)}" + (f" <<'END'\n{script}END" if script else ""))
        return "JOB"
    return _run_slurm_command("sbatch", "--parsable", *arguments, stdin=script).strip().partition(";")[0]


def _run_slurm_command(*command: str, stdin: str | None = None) -> str:
    """Run a Slurm command and return its output; raise UserError if it fails or is not installed."""
    try:
        process = subprocess.run(
            command, input=stdin, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--sbatch: {error}; run this command on a login node of a Slurm cluster") from error
    if process.returncode:
        raise UserError(f"--sbatch: {command[0]} failed: {process.stderr.strip() or f'exit code {process.returncode}'}")
    return process.stdout
