"""The command line: `fedmpi run | resume | validate | list | analyse`.

A mistake that the user can correct ends in one message and exit code 2; under a launcher `fedmpi/comm/alarm.py` sees to
that, since ranks may find the same one or a single rank one of its own.
"""

import json
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedmpi import config as configs
from fedmpi.comm.leaving import prepare, say
from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest
from fedmpi.common.version import __version__
from fedmpi.config import machine
from fedmpi.runtime import catalog

if TYPE_CHECKING:
    from fedmpi.comm.job import Job

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # of click, which newer versions of typer carry inside
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override the file: train.epochs=3")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A directory written by `fedmpi run`.")]
To = Annotated[Path, typer.Option(metavar="DIR", help="Where to write; files of the same names there are replaced.")]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Federated learning under data heterogeneity, on HPC clusters.",
    epilog="The same command under every launcher: mpirun -n 5 fedmpi run CONFIG.yaml, srun, torchrun --no-python.",
)

analyse = typer.Typer(help="Analyse filter decomposition in one process; write numbers and pictures.")
app.add_typer(analyse, name="analyse", short_help="Analyse filter decomposition.")


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
    _fit(settings)
    from fedmpi.runtime import launch

    raise typer.Exit(launch.run(settings))


@app.command(short_help="Go on with a run.")
def resume(directory: RunDir, overrides: Overrides = None) -> None:
    """Go on with the run in RUN_DIR, on any number of ranks; rounds=N asks for more. Code, data and settings must be
    those of its start, unless checkpoint.changes=accept."""
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory} is no run directory: it holds no config.yaml")
    here = directory.resolve()
    place = [f"output={json.dumps(str(here.parent))}", f"name={json.dumps(here.name)}", "checkpoint.resume=must"]
    run(here / "config.yaml", [*(overrides or ()), *place])


@app.command(short_help="Check a config and its data.")
def validate(config: Config, overrides: Overrides = None) -> None:
    """Check CONFIG, its data and its partition, and show what would be run, without training."""
    settings = configs.load(config, overrides or ())
    _fit(settings)
    from fedmpi.runtime import launch

    _table(launch.validate(settings))


@app.command("list", short_help="Show what a config may name.")
def show(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help=f"One of {', '.join(catalog.KINDS)}.")] = None,
) -> None:
    """Show the methods, models, datasets, partitions and tasks that a config may name."""
    if kind is not None and kind not in catalog.KINDS:
        raise UserError(f"list: unknown kind '{kind}'; {nearest(kind, catalog.KINDS)}")
    for each in [kind] if kind else catalog.KINDS:
        _say(f"{each}:")
        _table([(f"  {entry.name}", entry.line) for entry in catalog.entries(each)])


@analyse.callback(invoke_without_command=True)
def analyses(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@analyse.command(short_help="How much aggregated kernels vary.")
def variance(
    config: Config,
    overrides: Overrides = None,
    replicates: Annotated[int, typer.Option(min=2, help="How many times each measured round is made.")] = 5,
    to: To = Path("analysis"),
) -> None:
    """Train as CONFIG says and measure, every `evaluate.every` rounds, how much the aggregated kernels vary with
    cohort and training, averaged as kernels and as atoms and coefficients.

    Each measured round costs `--replicates` rounds on top of its own; method.personal=false makes them cheaper.
    """
    settings = configs.load(config, overrides or ())
    _fit(settings)
    _alone()
    from fedmpi.analysis.filter_decomposition import variance

    variance.analyse(settings, replicates, to, _say)


@analyse.command(short_help="The models behind an aggregate.")
def virtual(
    run: RunDir,
    overrides: Overrides = None,
    to: To = Path("analysis"),
    trust: Annotated[bool, typer.Option("--trust", help="Run the code of others that its config names.")] = False,
) -> None:
    """Make one more round from the final model of RUN_DIR and evaluate every product of one client's coefficients and
    another's atoms."""
    from fedmpi.runtime.trust import guard, run_settings

    settings = run_settings(run, trust, overrides or ())
    _fix_threads(min(settings.compute.threads, machine.cores()))  # the run may be of a larger machine
    _alone()
    from fedmpi.analysis.filter_decomposition import virtual

    with guard(trust):
        virtual.analyse(run, settings, to, _say)


@analyse.command(short_help="A metric against parameters transmitted.")
def communication(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Written by `fedmpi run`; ratios are to the first.")
    ],
    metric: Annotated[str, typer.Option(help="A metric in metrics.jsonl.")] = "accuracy",
    to: To = Path("analysis"),
) -> None:
    """Compare runs: a metric against the parameters that their clients have sent and received by then."""
    _fix_threads(1)
    _alone()
    from fedmpi.analysis import communication

    communication.analyse(runs, metric, to, _say)


@analyse.command(short_help="Averages of 5 and 25 linear models.")
def gaussians(
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0, to: To = Path("analysis")
) -> None:
    """Show averages of 5 and of 25 linear models of two weights on their loss landscape."""
    _fix_threads(1)
    _alone()
    from fedmpi.analysis.filter_decomposition import gaussians

    gaussians.analyse(seed, to, _say)


def main() -> NoReturn:
    """The console entry: run the command and turn what it raises into a message and an exit code."""
    prepare()
    signal.signal(signal.SIGINT, _interrupted)
    warnings.showwarning = _warn
    sys.path.append(os.getcwd())  # where `package.module:Name` in a config is looked for last
    try:
        code = _invoke()
    except UserError as error:
        code = _report(f"error: {error}", 2)
    except USAGE_ERROR as error:
        code = _report(f"error: {error.format_message()} (see fedmpi --help)", 2)
    except KeyboardInterrupt:
        code = _report("interrupted", 130)
    except BaseException:  # GeneratorExit, CancelledError and SystemExit, too: a rank does not go without a word
        code = _report(f"this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}", 1)
    _leave(code)


def _interrupted(number: int, frame: object) -> NoReturn:
    """Ctrl-C before training, or in a command that does not train: no exception, which an import could make into
    another one."""
    say(f"{_who(_job())}: interrupted")
    os._exit(128 + number)


def _invoke() -> int:
    """Run the command; not by `app()`, which handles an interrupt differently from version to version."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("fedmpi", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning is one plain line, on rank 0 only, as all ranks would say the same."""
    job = _job()
    if job is None or job.rank == 0:
        say(f"fedmpi: warning: {message}")


def _report(message: str, code: int) -> int:
    """Say the message and return the code; one of several ranks ends the job with it."""
    job = _job()
    if job is not None and job.size > 1:
        from fedmpi.comm.alarm import Alarm

        Alarm(job).fail(message, code)
    say(f"fedmpi: {message}")
    return code


def _who(job: "Job | None") -> str:
    return f"fedmpi [rank {job.rank} on {job.host}]" if job is not None and job.rank else "fedmpi"


def _job() -> "Job | None":
    from fedmpi.comm.launcher_env import detect

    try:
        return detect(os.environ)
    except UserError:  # the launcher itself is used wrongly: report as a single process
        return None


def _alone() -> None:
    from fedmpi.comm.launcher_env import detect

    job = detect(os.environ)
    if job.size > 1:
        raise UserError(
            f"analyse works in one process, and the launcher ({job.launcher}) started {job.size}; leave it out"
        )


def _leave(code: int) -> NoReturn:
    """End the process; a rank at once: what Python tidies up could wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more; Python would try once more, and end with a code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    job = _job()
    if job is not None and job.size > 1:
        os._exit(code)
    sys.exit(code)


def _fit(settings: configs.Settings) -> None:
    job = _job()
    machine.check(settings, writes=job is None or job.rank == 0)
    _fix_threads(settings.compute.threads)


def _fix_threads(threads: int) -> None:
    """Set the number of threads before torch is imported: it decides the last bits of sums, so the shell must not."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what it warns of at length, we say in a line


def _say(text: str) -> None:
    """A line on the console. A reader that went away (`| head`) ends nothing: what is still to be written is."""
    with suppress(OSError):
        typer.echo(text)


def _table(rows: list[tuple[str, str]]) -> None:
    width = max((len(left) for left, _ in rows), default=0)
    for left, right in rows:
        _say(f"{left:<{width}}  {right}".rstrip())
