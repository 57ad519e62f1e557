"""The command line; `fedmpi --help` shows its commands.

A mistake that the user can correct ends in one message and exit code 2; under a launcher `fedmpi/comm/loss/alarm.py`
sees to that, since ranks may find the same one or a single rank one of its own.
"""

import sys
from typing import NoReturn

import typer

from fedmpi.cli.ending import run_command
from fedmpi.cli.runs import app

if sys.argv[1:2] not in (["run"], ["resume"]):  # a rank starts sooner without the commands that it was not asked for
    from fedmpi.cli import compare, plan, reference, report, results, status, sweeps  # noqa: F401  register theirs
    from fedmpi.cli.analyses import analyse
    from fedmpi.cli.data import data

    app.add_typer(data, name="data", short_help="List, check and fetch data sets.")
    app.add_typer(analyse, name="analyse", short_help="Look behind the figures of runs.")


def main() -> NoReturn:
    """The console entry."""
    run_command(_invoke)


def _invoke() -> int:
    """Run the command; not by `app()`, which handles an interrupt differently from version to version."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("fedmpi", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0
