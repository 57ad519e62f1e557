"""Commands that train the runs of a sweep (sweep) and show their results in a table (table)."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Argument, Option

from fedmpi.cli.arguments import Jobs, Overrides, check_resources_and_set_threads, require_single_process, run_and_exit
from fedmpi.cli.runs import app, train_and_report
from fedmpi.common.errors import UserError
from fedmpi.common.signals import ProcessStartState
from fedmpi.config import Settings
from fedmpi.runtime.inspection.run_files import is_run_dir

if TYPE_CHECKING:
    from fedmpi.sweeps.expand import Sweep

SweepFile = Annotated[Path, Argument(metavar="SWEEP", help="A YAML file with `grid`.")]


@app.command(short_help="Train all runs of a sweep.")
def sweep(
    context: typer.Context,
    file: SweepFile,
    overrides: Overrides = None,
    jobs: Jobs = "auto",
    status: Annotated[bool, Option("--status", help="Show the progress of the runs, without training.")] = False,
    check: Annotated[bool, Option("--check", help="Like --status; exit code 2 unless all runs are finished.")] = False,
    resume: Annotated[bool, Option("--resume", help="Resume the sweep; an error if it was never started.")] = False,
    run: Annotated[str | None, Option(metavar="NAME", help="Train only this run, under any launcher.")] = None,
    sbatch: Annotated[bool, Option("--sbatch", help="Submit unfinished runs to Slurm as an array job.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="With --sbatch: show what would be submitted.")] = False,
    max_running: Annotated[int | None, Option(min=1, help="With --sbatch: number of tasks in parallel.")] = None,
    gpus: Annotated[int | None, Option(min=1, help="With --sbatch: GPUs per rank.")] = None,
    ranks: Annotated[int, Option(min=1, help="With --sbatch: ranks per run.")] = 1,
    option: Annotated[
        list[str] | None, Option(help="With --sbatch: an option of sbatch, --option=--mem=8G; repeatable.")
    ] = None,
) -> None:
    """Train all unfinished runs of SWEEP, in parallel on this machine or as a Slurm array job.

    Each run writes to output/NAME/RUN, gives the same results as `fedmpi run`, and is resumed if it was stopped.
    """
    from fedmpi.sweeps import expand, slurm, sweep_status

    definition = expand.load_sweep(file, overrides or ())
    place = definition.run_settings(definition.first_stage_labels()[0]).output
    if is_run_dir(place):
        problem = f"{place} is the directory of a run, which cannot contain the runs of a sweep"
        raise UserError(f"{file}: name: {problem}; choose another name")
    if run is not None:
        raise typer.Exit(_train_one_run(definition, run, context.obj))
    if resume and not place.is_dir():
        raise UserError(f"--resume: {place} does not exist, so {file} has not been started here; remove --resume")
    given = slurm.ArrayOptions(max_running, gpus, ranks, tuple(option or ()))
    if sbatch:
        raise typer.Exit(slurm.submit_sweep(definition, given, dry_run, typer.echo))
    if dry_run or given != slurm.ArrayOptions():
        raise UserError("--dry-run, --max-running, --gpus, --ranks and --option need --sbatch")
    if status and not check:
        sweep_status.show_status(definition, typer.echo)
        return
    check_resources_and_set_threads(definition.run_settings(definition.first_stage_labels()[0]))
    from fedmpi.sweeps import run_sweep as runs

    if not check:
        import fedmpi.reports.report
        import fedmpi.runtime.execute  # noqa: F401
    if check:
        return runs.print_status_and_update_tuning(definition, typer.echo)
    require_single_process()
    code = runs.run_sweep(definition, jobs, train_in_child_process, typer.echo)
    if not code:
        folder = shlex.quote(str(place))
        typer.echo(f"next: fedmpi table {folder}; fedmpi report {folder}")
    raise typer.Exit(code)


def _train_one_run(sweep: "Sweep", name: str, process: ProcessStartState) -> int:
    """Train the run `name` of a sweep unless it is finished, and return the exit code. Works under any launcher."""
    from fedmpi.sweeps import progress, slurm

    settings = progress.enable_auto_resume(slurm.find_run_by_name(sweep, name))
    if progress.read_state(settings).status == progress.DONE:
        return 0
    check_resources_and_set_threads(settings)
    import fedmpi.runtime.execute  # noqa: F401

    return train_and_report(settings, process)


@app.command(short_help="Show the results of a sweep.")
def table(
    file: Annotated[Path, Argument(metavar="SWEEP", help="The sweep's YAML file or directory.")],
    overrides: Overrides = None,
    metric: Annotated[str | None, Option(help="Of summary.json, or measured: losses.shift.")] = None,
    round_: Annotated[
        str | None, Option("--round", help="last, mean_last_10, best or selected; default: as published.")
    ] = None,
    rows: Annotated[str | None, Option(metavar="AXIS", help="The axis whose labels are the rows.")] = None,
    to: Annotated[
        Path | None, Option(metavar="FILE", help="Write it: .md, .tex, .csv, .txt, .png, .svg, .pdf.")
    ] = None,
) -> None:
    """Show a table of the results of SWEEP: mean and standard deviation over seeds for each cell.

    The output also contains paired differences, and published results for comparison.
    """
    from fedmpi.sweeps import expand, sweep_status, table_formats

    all_overrides = list(overrides or ())
    if file.is_dir():
        file, recorded_overrides = sweep_status.read_sweep_file_and_overrides(file)
        all_overrides = [*recorded_overrides, *all_overrides]
    sweep = expand.load_sweep(file, all_overrides)
    table_formats.print_and_write_table(sweep, metric, round_, rows, to, typer.echo)


def train_in_child_process(settings: Settings) -> NoReturn:
    """Train one run of a sweep in this child process, as `fedmpi run` does, and end the process with the exit code."""
    process = ProcessStartState()
    run_and_exit(lambda: train_and_report(settings, process), process)
