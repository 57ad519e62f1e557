"""The commands that train, check and list."""

import json
from typing import Annotated

import typer

from fedmpi import config as configs
from fedmpi.cli.shared import Config, MaybeConfig, Overrides, RunDir, Trust, fit, importing, show, table
from fedmpi.comm.loss.leaving import leave
from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest
from fedmpi.common.version import __version__
from fedmpi.runtime import catalog

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated learning under data heterogeneity, on HPC clusters.",
    epilog="The same command under every launcher: mpirun -n 5 fedmpi run CONFIG.yaml, srun, torchrun --no-python.",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version or context.invoked_subcommand is None:
        typer.echo(f"fedmpi {__version__}" if version else context.get_help())


@app.command(short_help="Train, and write a run directory.")
def run(config: Config, overrides: Overrides = None) -> None:
    """Train as CONFIG says; the results are written to a new directory under `output`."""
    settings = configs.load(config, overrides or ())
    fit(settings)
    with importing():
        from fedmpi.runtime import launch

    raise typer.Exit(launch.run(settings))


@app.command(short_help="Go on with a run.")
def resume(directory: RunDir, overrides: Overrides = None) -> None:
    """Go on with the run in RUN_DIR, on any number of ranks; rounds=N asks for more. Code, data and settings must be
    those of its start, unless checkpoint.changes=accept."""
    if not ((here := directory.resolve()) / "config.yaml").is_file():
        raise UserError(f"{directory} is no run directory: it holds no config.yaml")
    place = [f"output={json.dumps(str(here.parent))}", f"name={json.dumps(here.name)}", "checkpoint.resume=must"]
    copy = here / "initial.safetensors"  # of what it started from
    given = [f"init.from={json.dumps(str(copy))}"] if copy.is_file() else []
    run(here / "config.yaml", [*given, *(overrides or ()), *place])


@app.command(short_help="Check that a run can be repeated.")
def replay(
    directory: RunDir,
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Train as in RUN_DIR once more, on any number of ranks, without its faults but with the clients that they cost in
    each round, and compare the model of every round bit by bit. Written beside it, as NAME-replay."""
    from fedmpi.runtime.resuming import replay as again

    settings = again.settings(directory.resolve(), trust, overrides or ())
    fit(settings)
    raise typer.Exit(again.run(directory, settings, trust, show))


@app.command(short_help="Check a config and its data.")
def validate(config: Config, overrides: Overrides = None) -> None:
    """Check CONFIG, its data and its partition, and show what would be run, without training."""
    settings = configs.load(config, overrides or ())
    fit(settings)
    with importing():
        from fedmpi.runtime import launch

    table(launch.validate(settings))


@app.command(short_help="Show what this machine has.")
def doctor(config: MaybeConfig = None, overrides: Overrides = None) -> None:
    """Show what this machine has, what CONFIG would get here, and what is wrong, to be read or put into a bug report.
    Exit code 1 if something keeps CONFIG from running."""
    from fedmpi.doctor import report

    leave(0 if report.silent() else report.report(show, config, overrides or ()))


@app.command("list", short_help="Show what a config may name.")
def list_(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help=f"One of {', '.join(catalog.KINDS)}.")] = None,
) -> None:
    """Show the methods, models, datasets, partitions and tasks that a config may name."""
    if kind is not None and kind not in catalog.KINDS:
        raise UserError(f"list: unknown kind '{kind}'; {nearest(kind, catalog.KINDS)}")
    for each in [kind] if kind else catalog.KINDS:
        show(f"{each}:")
        table([(f"  {entry.name}", entry.line) for entry in catalog.entries(each)])
