"""How a command ends: what it raises becomes a message and an exit code."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from fedmpi.cli.shared import current_job
from fedmpi.comm.failures.process_exit import leave, say, setup_stdio
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.signals import CommandProcess

if TYPE_CHECKING:
    from fedmpi.comm.launchers.job import Job

USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # of click, which newer versions of typer carry inside


def run_command(command: Callable[[], int], process: CommandProcess) -> NoReturn:
    """Call `command` and end the process with its exit code; turn what it raises into a message and an exit code."""
    setup_stdio()
    signal.signal(signal.SIGINT, _interrupted)
    warnings.showwarning = _warn
    sys.path.append(os.getcwd())  # where `package.module:Name` in a config is looked for last
    try:
        code = command()
    except UserError as error:
        code = _report(process, f"error: {error}", 2)
    except USAGE_ERROR as error:
        code = _report(process, f"error: {error.format_message()} (see fedmpi --help)", 2)
    except KeyboardInterrupt:
        code = _report(process, "interrupted", 130)
    except BaseException:  # GeneratorExit, CancelledError and SystemExit, too: a rank does not go without a word
        code = _report(process, f"this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}", 1)
    _leave(code)


def _interrupted(number: int, frame: object) -> NoReturn:
    """Ctrl-C before training, or in a command that does not train: no exception, which an import could make into
    another one."""
    say(f"{_who(current_job())}: interrupted")
    os._exit(128 + number)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning is one plain line; most on rank 0 only (RankWarning)."""
    job = current_job()
    if job is None or job.rank == 0 or isinstance(message, RankWarning):
        say(f"{_who(job)}: warning: {message}")


def _report(process: CommandProcess, message: str, code: int) -> int:
    """Print the message and return the code; one of several ranks ends the job with it."""
    job = current_job()
    if job is not None and job.size > 1:
        from fedmpi.comm.failures.error_reporter import ErrorReporter

        ErrorReporter(replace(job, parent_pid=process.parent_pid), stop=process.stop).fail(message, code)
    say(f"fedmpi: {message}")
    return code


def _who(job: "Job | None") -> str:
    return f"fedmpi [rank {job.rank} on {job.host}]" if job is not None and job.rank else "fedmpi"


def _leave(code: int) -> NoReturn:
    """End the process; a rank at once: what Python tidies up could wait for ranks that are gone."""
    job = current_job()
    if job is not None and job.size > 1:
        leave(code)
    sys.exit(code)
