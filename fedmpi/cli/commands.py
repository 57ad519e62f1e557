"""The commands of `fedmpi`; `fedmpi --help` shows them.

A mistake that the user can correct ends in one message and exit code 2; under a launcher
`fedmpi/comm/failures/error_reporter.py` sees to that, since ranks may find the same one or one rank one of its own.
"""

from collections.abc import Sequence

import typer

from fedmpi.cli.runs import app
from fedmpi.common.signals import CommandProcess


def load_app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the app with all commands; for `run` and `resume` only those of runs.py, so that a rank starts sooner.

    words: the command line, without the name of the program.
    """
    if list(words[:1]) not in (["run"], ["resume"]):
        from fedmpi.cli import inspect_runs, list_show, sweeps  # noqa: F401  register theirs
        from fedmpi.cli.analyses import analyse
        from fedmpi.cli.list_show import data

        if not app.registered_groups:
            app.add_typer(data, name="data", short_help="List, check and fetch data sets.")
            app.add_typer(analyse, name="analyse", short_help="Look behind the figures of runs.")
    return app


def invoke(words: Sequence[str], process: CommandProcess) -> int:
    """Run the command that `words` name and return its exit code.

    Not by `app()`, which handles an interrupt differently from version to version.
    """
    command = typer.main.get_command(load_app(words))
    try:
        with command.make_context("fedmpi", list(words), obj=process) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0
