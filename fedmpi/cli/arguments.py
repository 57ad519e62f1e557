"""Code that the commands share: arguments, number of threads, console output and exit codes."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Argument, Option

from fedmpi import config as configs
from fedmpi.comm.failures.error_reporter import ErrorReporter, make_message_prefix
from fedmpi.comm.failures.process_exit import exit_now, print_message, setup_stdio
from fedmpi.comm.launchers import Job, detect
from fedmpi.common import formatting
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.host_memory import count_usable_cores
from fedmpi.common.signals import ProcessStartState
from fedmpi.config import resources

Config = Annotated[Path, Argument(metavar="CONFIG", help="The YAML file of the run.")]
MaybeConfig = Annotated[Path | None, Argument(metavar="[CONFIG]", help="The YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Override the config: train.epochs=3; later ones win.")
]
RunDir = Annotated[Path, Argument(metavar="RUN_DIR", help="A directory written by `fedmpi run`.")]
To = Annotated[Path, Option(metavar="DIR", help="The output folder; existing files are replaced.")]
Trust = Annotated[bool, Option("--trust", help="Run external code that the config names.")]
Best = Annotated[bool, Option("--best", help="Use the best model by evaluate.best, not the final one.")]
Client = Annotated[str | None, Option(metavar="K", help="Use the model of this client: its number or site.")]
Jobs = Annotated[str, Option(help="Runs in parallel; auto: as many as cores, memory and GPUs allow.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # a class of click, which newer versions of typer vendor
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
UNKNOWN_JOB = Job("single", 0, 1, 0, 1, "")


def current_job() -> Job:
    """Return the job of this process; a job of one process if the launcher's environment variables are invalid."""
    try:
        return detect(os.environ)
    except UserError:  # the command reports the error
        return UNKNOWN_JOB


def require_single_process(command: str = "analyse") -> None:
    """Raise UserError, with the name of the command in its message, if a launcher has started several processes."""
    job = detect(os.environ)
    if job.size > 1:
        raise UserError(
            f"{command} must run as a single process, but {job.launcher} started {job.size}; run it without a launcher"
        )


def check_resources_and_set_threads(settings: configs.Settings, single_process_command: str | None = None) -> None:
    """Check that this machine has the resources that the settings require, and set the number of threads.

    Args:
        settings: the settings of the run.
        single_process_command: the name of the command if it must run as a single process, otherwise None.

    Raises:
        UserError: a resource is missing, or the command must run as a single process, but several were started.
    """
    if single_process_command is not None:
        require_single_process(single_process_command)
    resources.check_threads_and_output_dir(settings, writes=current_job().rank == 0)
    set_threads(settings.compute.threads)


def load_run_settings(run: Path, trust: bool, overrides: Sequence[str] | None, command: str) -> configs.Settings:
    """Return the settings of a finished run for a single-process command, and set the number of threads.

    Args:
        run: the run directory.
        trust: whether code outside fedmpi that the config names may be executed.
        overrides: KEY=VALUE settings that override those of the run.
        command: the name of the command, for messages.
    """
    from fedmpi.runtime import code_trust as trusting

    require_single_process(command)
    settings = trusting.load_run_settings(run, trust, overrides or ())
    set_threads(min(settings.compute.threads, count_usable_cores()))  # the run may be from a machine with more cores
    return settings


def set_threads(threads: int) -> None:
    """Set the number of threads of this process, before torch is imported.

    This number influences the last bits of sums, so the settings determine it, not the user's environment variables.
    """
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # fedmpi prints these warnings in one line


def print_table(rows: list[tuple[str, str]]) -> None:
    """Print a table with left-aligned columns."""
    for line in formatting.format_table(rows, "left"):
        typer.echo(line)


def make_command_group(help_text: str) -> typer.Typer:
    """Create a group of commands, such as `fedmpi data`, that prints its help if no command is given."""
    commands = typer.Typer(help=help_text)

    @commands.callback(invoke_without_command=True)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return commands


def run_and_exit(command: Callable[[], int], process: ProcessStartState) -> NoReturn:
    """Call a command and end the process with its exit code; after an exception, print a message first."""
    setup_stdio()
    signal.signal(signal.SIGINT, _handle_interrupt)
    warnings.showwarning = _print_warning
    sys.path.append(os.getcwd())  # the last place to search for `package.module:Name` of a config
    try:
        code = command()
    except UserError as error:
        code = _report_error(process, f"error: {error}", 2)
    except USAGE_ERROR as error:
        code = _report_error(process, f"error: {error.format_message().rstrip('.')} (see fedmpi --help)", 2)
    except KeyboardInterrupt:
        code = _report_error(process, "interrupted", 130)
    except BaseException:  # GeneratorExit, CancelledError and SystemExit, too: a rank must not exit without a message
        code = _report_error(process, f"unexpected error in fedmpi or in a plug-in:\n{traceback.format_exc()}", 1)
    if current_job().size > 1:
        exit_now(code)  # at once, because Python's clean-up could wait for lost ranks
    sys.exit(code)


def _handle_interrupt(number: int, frame: object) -> NoReturn:
    """Handle Ctrl-C outside training: end the process at once.

    KeyboardInterrupt is not raised, because a module that is being imported could catch it.
    """
    print_message(f"{make_message_prefix(current_job())}: interrupted")
    os._exit(128 + number)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on one line; ranks other than 0 print only warnings of class RankWarning."""
    job = current_job()
    if job.rank == 0 or isinstance(message, RankWarning):
        print_message(f"{make_message_prefix(job)}: warning: {message}")


def _report_error(process: ProcessStartState, message: str, code: int) -> int:
    """Print an error message and return the exit code; in a job of several ranks, end the whole job."""
    job = current_job()
    if job.size > 1:
        ErrorReporter(replace(job, parent_pid=process.parent_pid), stop=process.stop).fail(message, code)
    print_message(f"fedmpi: {message}")
    return code
