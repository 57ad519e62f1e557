"""The command line of fedmpi; `main` is the entry point of the console script.

An error that the user can correct ends the command with one message and exit code 2. Under a launcher, where the error
may occur on one rank or on all ranks, `fedmpi/comm/failures/error_reporter.py` prints the message once.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from fedmpi.common.signals import ProcessStartState

if TYPE_CHECKING:
    import typer


def main() -> NoReturn:
    """Run the command in sys.argv, and end the process with the command's exit code.

    Importing typer, pydantic and torch takes seconds, so signal handlers are installed first: Ctrl-C ends the process
    without a traceback, and `fedmpi run` only records a request to stop, because a rank that is killed by a signal
    would end the whole job.
    """
    process = ProcessStartState()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `run_and_exit` installs its own handler
    if sys.argv[1:2] in (["run"], ["resume"]):
        gc.disable()  # imports are 10 % faster without it; it is enabled again before training
        process.stop.install_handlers(signal.SIGINT)
    from fedmpi.cli.arguments import run_and_exit

    run_and_exit(lambda: invoke(sys.argv[1:], process), process)


def load_app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the app with all commands; for `run` and `resume`, which must start quickly, only those of runs.py.

    words: the command line, without the name of the program.
    """
    from fedmpi.cli.runs import app

    if list(words[:1]) not in (["run"], ["resume"]):
        from fedmpi.cli import inspect_runs, list_show, sweeps  # noqa: F401  register their commands
        from fedmpi.cli.analyses import analyse
        from fedmpi.cli.list_show import data

        if not app.registered_groups:
            app.add_typer(data, name="data", short_help="List, check and download public data sets.")
            app.add_typer(analyse, name="analyse", short_help="Compute further metrics and figures of runs.")
    return app


def invoke(words: Sequence[str], process: ProcessStartState) -> int:
    """Run a command, given as the words of its command line, and return its exit code.

    `app()` is not called, because its handling of interrupts differs between versions of typer.
    """
    import typer

    command = typer.main.get_command(load_app(words))
    try:
        with command.make_context("fedmpi", list(words), obj=process) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0
