"""The command line: `fedmpi run | validate | list`.

A mistake that the user can mend ends in one message and exit code 2. Under a launcher all ranks read the same config
and find the same mistake: rank 0 reports it and exits, whereupon the launcher ends the others. They wait `PATIENCE_S`
for that, then each reports on its own, so that a mistake only one of them sees is never silent.
"""

import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedmpi import __version__, listing
from fedmpi import config as configs
from fedmpi.errors import UserError
from fedmpi.wording import nearest

if TYPE_CHECKING:
    from fedmpi.comm.job import Job

PATIENCE_S = 3.0
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # of click, which newer versions of typer carry inside
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file: train.epochs=3")
]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

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
    if version:
        typer.echo(f"fedmpi {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Train, and write a run directory.")
def run(config: Config, overrides: Overrides = None) -> None:
    """Train as CONFIG says; the results lie in a new directory under `output`."""
    settings = configs.load(config, overrides or ())
    _fix_threads(settings.compute.threads)
    from fedmpi import launch  # imports torch: after the config is known to be right, and the threads are set

    raise typer.Exit(launch.run(settings))


@app.command(short_help="Check a config and its data.")
def validate(config: Config, overrides: Overrides = None) -> None:
    """Check CONFIG, its data and its partition, and show what would be run; trains nothing."""
    settings = configs.load(config, overrides or ())
    _fix_threads(settings.compute.threads)
    from fedmpi import launch

    _table(launch.validate(settings))


@app.command("list", short_help="Show what a config may name.")
def show(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help=f"One of {', '.join(listing.KINDS)}.")] = None,
) -> None:
    """Show the methods, models, datasets, partitions and tasks that a config may name."""
    if kind is not None and kind not in listing.KINDS:
        raise UserError(f"list: unknown kind '{kind}'; {nearest(kind, listing.KINDS)}")
    for each in [kind] if kind else listing.KINDS:
        typer.echo(f"{each}:")
        _table([(f"  {entry.name}", entry.line) for entry in listing.entries(each)])


def main() -> NoReturn:
    """The console entry: runs the command and turns what it raises into a message and an exit code."""
    warnings.showwarning = _warn
    sys.path.append(os.getcwd())  # where `package.module:Name` in a config is looked for last
    try:
        code = _invoke()
    except UserError as error:
        code = _report(str(error))
    except USAGE_ERROR as error:
        code = _report(f"{error.format_message()} (see fedmpi --help)")
    except KeyboardInterrupt:
        sys.stderr.write("fedmpi: interrupted\n")
        code = 130
    except Exception:
        sys.stderr.write(f"{_who(_job())}: this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}")
        code = 1
    _leave(code)


def _invoke() -> int:
    """Not `app()`, which would swallow an interrupt in a way that differs from version to version."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("fedmpi", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning is one plain line, on rank 0: all ranks would say the same."""
    job = _job()
    if job is None or job.rank == 0:
        sys.stderr.write(f"fedmpi: warning: {message}\n")


def _report(message: str) -> int:
    """Writes the message on rank 0 at once, elsewhere (with rank and host) only if nobody ended us meanwhile."""
    job = _job()
    if job is not None and job.rank > 0:
        time.sleep(PATIENCE_S)
        sys.stderr.write(f"{_who(job)}: error: {message}\n")
    else:
        sys.stderr.write(f"fedmpi: error: {message}\n")
    return 2


def _who(job: "Job | None") -> str:
    return f"fedmpi [rank {job.rank} on {job.host}]" if job is not None and job.size > 1 else "fedmpi"


def _job() -> "Job | None":
    from fedmpi.comm.job import detect  # its package imports torch: not before it is needed

    try:
        return detect(os.environ)
    except UserError:  # the launcher itself is what is wrong: then there is one process, and it reports
        return None


def _leave(code: int) -> NoReturn:
    """Ends the process. A rank that fails must not wait for the others in MPI_Finalize: they wait for it elsewhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    job = _job() if code else None
    if job is not None and job.size > 1:
        os._exit(code)
    sys.exit(code)


def _fix_threads(threads: int) -> None:
    """Before torch is imported: the number of threads decides the last bits of a sum; the shell must have no say."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)


def _table(rows: list[tuple[str, str]]) -> None:
    width = max((len(left) for left, _ in rows), default=0)
    for left, right in rows:
        typer.echo(f"{left:<{width}}  {right}".rstrip())
