"""The command line; `main` is the entry point of the console script."""

from __future__ import annotations

import gc
import signal
import sys
from typing import NoReturn

from fedmpi.common.signals import CommandProcess


def main() -> NoReturn:
    """Run the command that sys.argv names, and end the process with its exit code.

    Importing typer, pydantic and torch takes seconds, so signals are handled before: Ctrl-C ends the process without a
    traceback, and `fedmpi run` remembers a request to stop, because a rank that a signal kills ends the whole job.
    """
    process = CommandProcess()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `run_command` has its own handler
    if sys.argv[1:2] in (["run"], ["resume"]):
        gc.disable()  # until all is imported, which takes a tenth less time without it
        process.stop.listen(signal.SIGINT)
    from fedmpi.cli.runs import invoke
    from fedmpi.cli.shared import run_command

    run_command(lambda: invoke(sys.argv[1:], process), process)
