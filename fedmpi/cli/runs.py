"""Commands that start runs (run, resume, replay) or examine a config (validate, plan, partition, doctor)."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from fedmpi import config as configs
from fedmpi.cli.arguments import (
    AsJson,
    Config,
    MaybeConfig,
    Overrides,
    RunDir,
    Trust,
    check_resources_and_set_threads,
    print_table,
)
from fedmpi.comm.failures.process_exit import exit_now
from fedmpi.common.errors import UserError
from fedmpi.common.signals import ProcessStartState
from fedmpi.common.version import __version__
from fedmpi.config import Settings
from fedmpi.reports import write_report_after_run

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated learning under data heterogeneity, on HPC clusters.",
    epilog="The same command under every launcher: mpirun -n 5 fedmpi run CONFIG.yaml, srun, torchrun --no-python.",
)


@app.callback(invoke_without_command=True)
def show_version_or_help(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Show the version, or the help if no command is given."""
    if version or context.invoked_subcommand is None:
        typer.echo(f"fedmpi {__version__}" if version else context.get_help())


@app.command(short_help="Train a model and write a run directory.")
def run(context: typer.Context, config: Config, overrides: Overrides = None) -> None:
    """Train a model with the settings in CONFIG, and write the results to a new directory in `output`."""
    _train_and_exit(configs.load(config, overrides or ()), context.obj)


def _train_and_exit(settings: Settings, process: ProcessStartState) -> NoReturn:
    """Train one run, and end the command with the run's exit code."""
    check_resources_and_set_threads(settings)
    import fedmpi.runtime.execute  # noqa: F401

    gc.freeze()  # imported objects need no collection; `main` has disabled the collector until here
    gc.enable()
    raise typer.Exit(train_and_report(settings, process))


def train_and_report(settings: Settings, process: ProcessStartState) -> int:
    """Train one run, write its report page, and return the exit code of `execute_run`."""
    from fedmpi.runtime.execute import execute_run

    def after(settings: Settings, result: dict[str, Any]) -> None:
        written = write_report_after_run(settings, result)
        if written is not None:
            typer.echo(f"report: {written}")

    return execute_run(settings, process, after)[1]


@app.command(short_help="Resume a run.")
def resume(context: typer.Context, directory: RunDir, overrides: Overrides = None) -> None:
    """Resume the run in RUN_DIR from its last checkpoint, on any number of ranks.

    The override rounds=N extends the run. Code, data and settings must be the same as at the start of the run, unless
    checkpoint.changes=accept.
    """
    from fedmpi.runtime.code_trust import load_resume_settings
    from fedmpi.runtime.inspection.run_files import not_a_run_error

    run_dir = directory.resolve()
    if not (run_dir / "config.yaml").is_file():
        raise not_a_run_error(directory)
    _check_same_directory(directory, overrides or ())
    fixed_overrides = [
        f"output={json.dumps(str(run_dir.parent))}",
        f"name={json.dumps(run_dir.name)}",
        "checkpoint.resume=must",
    ]
    copy = run_dir / "initial.safetensors"  # a copy of the weights that the run started from
    initial_overrides = [f"init.from={json.dumps(str(copy))}"] if copy.is_file() else []
    _train_and_exit(
        load_resume_settings(run_dir, [*initial_overrides, *(overrides or ()), *fixed_overrides]), context.obj
    )


def _check_same_directory(directory: Path, overrides: Sequence[str]) -> None:
    """Raise UserError if an override sets `name`, `output` or `checkpoint.resume`, which RUN_DIR determines."""
    fixed = ("name", "output", "checkpoint.resume")
    override = next((each for each in overrides if each.partition("=")[0] in fixed), None)
    if override is not None:
        raise UserError(f"{override} is not allowed here, because {directory} determines the run; remove this override")


@app.command(short_help="Check that a run can be repeated.")
def replay(context: typer.Context, directory: RunDir, overrides: Overrides = None, trust: Trust = False) -> None:
    """Repeat the run in RUN_DIR on any number of ranks, and compare the model after each round bit by bit.

    Rank failures of the run are not reproduced; instead, the clients that were lost in a round are left out of it. The
    results are written to NAME-replay next to RUN_DIR.
    """
    from fedmpi.runtime.code_trust import load_replay_settings

    _check_same_directory(directory, overrides or ())
    settings = load_replay_settings(directory.resolve(), trust, overrides or ())
    check_resources_and_set_threads(settings)
    from fedmpi.runtime.finished_runs.replay import replay_run as replay_run

    raise typer.Exit(replay_run(directory, settings, trust, typer.echo, context.obj))


@app.command(short_help="Check a config and its data.")
def validate(config: Config, overrides: Overrides = None) -> None:
    """Check CONFIG, its data and its partition, and show a summary of the run, without training.

    For a sweep, the settings of all runs are checked. Data, models and methods are checked for as many runs as are
    needed to cover every value in the sweep.
    """
    from fedmpi.sweeps import expand

    if expand.is_sweep_file(config):
        sweep = expand.load_sweep(config, overrides or ())
        check_resources_and_set_threads(sweep.run_settings(sweep.labels[0]))
        from fedmpi.sweeps import run_sweep as runs

        return runs.validate_sweep(sweep, typer.echo)
    settings = configs.load(config, overrides or ())
    check_resources_and_set_threads(settings)
    from fedmpi.runtime.validate import validate_settings

    print_table(validate_settings(settings))


@app.command(short_help="Show the memory and traffic of a run.")
def plan(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, Option("-n", "--ranks", min=1, help="Number of ranks, including rank 0.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show the memory and the traffic, in bytes, that a run of CONFIG on N ranks would need, without training."""
    from fedmpi.sweeps import expand

    if expand.is_sweep_file(config):
        raise UserError(f"{config} is a sweep of several runs; give the config of one run, without `grid`")
    settings = configs.load(config, overrides or ())
    check_resources_and_set_threads(settings, "plan")
    from fedmpi.doctor import plan as planning

    facts = planning.estimate_run(settings, ranks)
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(planning.format_estimate(facts)))


@app.command(short_help="Show how samples are divided among clients.")
def partition(
    config: Config,
    overrides: Overrides = None,
    write: Annotated[Path | None, Option(metavar="FILE", help=".csv, for scheme `file`.")] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help=".png, .svg or .pdf.")] = None,
) -> None:
    """Divide the data among the clients with the settings in CONFIG and show the result, without training.

    The output contains sizes, classes, distances of the clients' label distributions from that of all samples and, for
    few clients, the number of samples per client and class.
    """
    settings = configs.load(config, overrides or ())
    check_resources_and_set_threads(settings)
    from fedmpi.analysis import partition as division

    division.analyse_partition(settings, write, plot, typer.echo)


@app.command(short_help="Examine this machine.")
def doctor(config: MaybeConfig = None, overrides: Overrides = None) -> None:
    """Show the software and hardware of this machine, the resources that CONFIG would use here, and any problems.

    The output can be copied into a bug report. The exit code is 1 if a problem prevents CONFIG from running.
    """
    from fedmpi.doctor import report_rows

    exit_now(report_rows.print_report(typer.echo, config, overrides or ()))
