"""`fedmpi sweep --sbatch`: submit the missing runs as a job array, and a final job that fails unless all are done.

A task of the array starts `fedmpi sweep SWEEP --run NAME` with srun. It uses the same run directory each time that it
is started, and requests a requeue from Slurm if its time limit was reached. slurm/submitted.jsonl, beside the runs,
records which job trains which runs.
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
from fedmpi.runtime.inspection.run_files import read_tail
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
told='' fresh=1
read -r told fresh 2>/dev/null <"$FEDMPI_OUTCOME" || true
rm -f "$FEDMPI_OUTCOME"
code=${{told:-$code}}
[[ $code -ne 138 ]] || code=75  # the warning came before it was listened to
[[ $code -eq 75 ]] || exit "$code"
shown=$(scontrol show job "$me" 2>/dev/null) || true
if [[ $shown != *JobState=RUNNING* && $shown != *Reason=TimeLimit* ]]; then
    echo "$name: this job was ended by Slurm or a user; submit the sweep again to go on" >&2
elif [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 && $fresh -eq 0 ]]; then
    echo "$name: not requeued: no round was completed since it was started again; give it more --time" >&2
elif scontrol requeue "$me"; then
    echo "$name: job $me is requeued, and will go on" >&2
fi
exit 75
"""


@dataclass(frozen=True)
class ArrayOptions:
    """The options of a job array."""

    max_running: int | None = None  # tasks that Slurm runs at the same time; None: no limit
    gpus: int | None = None  # per rank
    ranks: int = 1  # per run
    options: tuple[str, ...] = ()  # further options of sbatch


def submit_sweep(sweep: Sweep, asked: ArrayOptions, dry: bool, say: Callable[[str], None]) -> int:
    """Submit the runs of a sweep that are missing and not queued, or with `dry` only show the commands.

    Raises:
        UserError: if an option is invalid, or a command of Slurm fails.
    """
    if wrong := [option for option in asked.options if not option.startswith("-")]:
        raise UserError(f"--option: {wrong[0]!r}; an option of sbatch is needed: --option=--mem=8G")
    every = [settings for _, settings in sweep.first_stage_runs()]
    place = every[0].output.absolute()
    folder, waiting = place / SLURM_FOLDER, list_queued_runs(place)
    missing = [settings.name for settings in every if not sweep.needs_no_training(settings)]
    arrays = [[name for name in names if name not in waiting] for names in (missing, _runs_after_tuning(sweep))]
    if not any(arrays):
        say(f"nothing to submit: {pluralize(len(waiting), 'run')} in the queue, the others are done")
        return 0
    if not dry:
        sweep.write_run_list(place, [settings.name for settings in every])
        folder.mkdir(exist_ok=True)
    threads, jobs = max(settings.compute.threads for settings in every), list[str]()
    for names in filter(None, arrays):  # runs that wait for the choice of `tune` start when the tuning runs have ended
        after = [f"--dependency=afterany:{jobs[0]}"] if jobs else []
        jobs.append(_submit_job(after, build_array_script(sweep, asked, names, place, threads), dry, say))
        if not dry:
            with (folder / SUBMITTED_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": jobs[-1], "names": names}) + "\n")
    others = {entry["job"] for entry in _read_submitted_jobs(place) if set(entry["names"]) & set(waiting)}
    words = [each for each in asked.options if each.startswith(("--partition", "--account"))]
    words += [f"--job-name={place.name}-end", "--ntasks=1", f"--output={folder}/end-%j.log"]
    words += [f"--dependency=afterany:{':'.join([*jobs, *sorted(others)])}"]
    words += [f"--wrap=cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*_sweep_command(sweep), '--check'])}"]
    end = _submit_job(words, None, dry, say)
    if not dry:
        runs = pluralize(sum(map(len, arrays)), "run")
        say(f"{runs} in job {', '.join(jobs)}; job {end} fails if one is missing at the end")
    return 0


def _runs_after_tuning(sweep: Sweep) -> list[str]:
    """Return the names, without a candidate's labels, of runs that can start only after `tune` has chosen."""
    best, runs = sweep.tuning, sweep.final_runs() if sweep.tuning else []
    waiting = [(labels, run) for labels, run in runs if best and not best.is_tuning_run(labels)]
    return [sweep.run_name(labels) for labels, run in waiting if run is None or not sweep.needs_no_training(run)]


def build_array_script(sweep: Sweep, asked: ArrayOptions, names: Sequence[str], place: Path, threads: int) -> str:
    """Return the batch script of a Slurm job array that trains one run of a sweep per task, with `threads` per rank."""
    folder = place / SLURM_FOLDER
    limit = f"%{asked.max_running}" if asked.max_running else ""
    options = [f"--job-name={place.name}", f"--array=0-{len(names) - 1}{limit}", f"--output={folder}/%A_%a.log"]
    options += ["--open-mode=append", "--requeue", f"--signal=USR1@{SIGNAL_BEFORE_LIMIT_S}"]
    options += [f"--ntasks={asked.ranks}", f"--cpus-per-task={threads}"]
    # --gpus-per-task would hide the GPU of each task from the others.
    options += ["--nodes=1", f"--gpus-per-node={asked.ranks * asked.gpus}"] if asked.gpus else []
    return ARRAY_SCRIPT.format(
        options="\n".join(f"#SBATCH {each}" for each in [*options, *asked.options]),
        here=shlex.quote(str(Path.cwd())),
        names="\n".join(map(shlex.quote, names)),
        folder=shlex.quote(str(folder)),
        threads=threads,
        command=shlex.join(_sweep_command(sweep)),
    )


def find_run(sweep: Sweep, name: str) -> Settings:
    """Return the settings of the run with this name; with `tune`, the part for the candidate may be left out.

    Raises:
        UserError: if no run has this name, or the run waits for the choice of `tune`.
    """
    for labels, settings in sweep.final_runs():
        if settings is None and sweep.tuning is not None and sweep.run_name(labels) == name:
            raise UserError(f"--run: {name} waits: tune: {sweep.tuning_choices()[sweep.tuning.cell_key(labels)]}")
        if settings is not None and sweep.run_name(labels) == name:
            return settings
    for settings in sweep.known_runs():
        if settings.name == name:
            return settings
    raise UserError(f"--run: no run of {sweep.path} is named {name}; fedmpi sweep {sweep.path} --status names them")


def list_queued_runs(place: Path) -> dict[str, str]:
    """Return the runs that are queued or running in Slurm, {name: `12_3 RUNNING`}."""
    names = {
        (entry["job"], str(at)): name for entry in _read_submitted_jobs(place) for at, name in enumerate(entry["names"])
    }
    try:
        output = _run_slurm_command("squeue", "--noheader", "--array", "--me", "--format=%F %K %T") if names else ""
    except UserError:
        return {}
    cells = [line.split() for line in output.splitlines()]
    return {names[job, at]: f"{job}_{at} {what}" for job, at, what in cells if (job, at) in names}


def _read_submitted_jobs(place: Path) -> list[dict]:
    rows = read_tail(place / SLURM_FOLDER / SUBMITTED_FILE)
    return [row for row in rows if "job" in row and isinstance(row.get("names"), list)]


def _sweep_command(sweep: Sweep) -> list[str]:
    return [sys.executable, "-m", "fedmpi", "sweep", str(sweep.path.absolute()), *sweep.all_overrides]


def _submit_job(words: Sequence[str], text: str | None, dry: bool, say: Callable[[str], None]) -> str:
    """Submit a job and return its number; with `dry`, only show the command."""
    if dry:
        say(f"sbatch {shlex.join(words)}" + (f" <<'END'\n{text}END" if text else ""))
        return "JOB"
    return _run_slurm_command("sbatch", "--parsable", *words, given=text).strip().partition(";")[0]


def _run_slurm_command(*words: str, given: str | None = None) -> str:
    """Run a command of Slurm and return its output; raise UserError if there is no such command, or if it fails."""
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--sbatch: {error}; submit on a login node of a Slurm cluster") from error
    if done.returncode:
        raise UserError(f"--sbatch: {words[0]} refuses: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
