"""The end of a process: its last message, and its exit. Neither may fail, whatever became of its standard streams."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from fedmpi.comm import network
from fedmpi.comm.launchers import launcher_env

if TYPE_CHECKING:
    from fedmpi.comm.launchers.job import Job

ABORT_S = 3.0  # allowed for MPI_Abort


class Process:
    """What a rank does to its own process when the job fails. Tests of ranks as threads replace it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def say(self, text: str) -> None:
        """Print a message on stderr."""
        say(text)

    def exit(self, code: int) -> NoReturn:
        """End this process."""
        leave(code)

    def end_job(self, code: int) -> NoReturn:
        """End this process and the job.

        MPI must be told; torchrun and `srun --kill-on-bad-exit` end the other ranks when one exits with an error.
        """
        MPI = sys.modules.get("mpi4py.MPI")  # None where this process has not loaded MPI
        if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
            with open(os.devnull, "w") as nowhere:  # the exit after ABORT_S: Abort may wait for a dead launcher
                faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)
                MPI.COMM_WORLD.Abort(code)
        leave(code)

    def exit_after_eviction(self) -> NoReturn:
        """End a rank that the others have gone on without."""
        if self.job.launcher == "mpi":  # mpirun takes any other end of a rank for the failure of the whole job
            os.kill(os.getpid(), signal.SIGKILL)
        leave(1)

    def restore_sigterm(self) -> None:
        """Let SIGTERM end this process again: the launcher may end a rank that has nothing to add."""
        with contextlib.suppress(ValueError):  # only the main thread can
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def has_own_console(self) -> bool:
        """Return whether what rank 0 prints is not seen where this rank was started: on another host, by a launcher
        that does not bring the output of all hosts together."""
        job = self.job
        if job.rank == job.local_rank or launcher_env.collects_output(job, os.environ):
            return False
        return job.launcher != "env://" or not network.is_own(os.environ["MASTER_ADDR"])

    def is_first_of_host(self) -> bool:
        """Return whether no other living rank of this host has asked before."""
        self._held = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            self._held.bind(f"\0fedmpi of {self.job.launcher_pid()}")
            return True
        return False


def prepare() -> None:
    """Make sure that printing does not fail, and that a fatal signal prints the stacks of all threads on stderr.

    Where the shell has closed a standard stream, its number would go to the next file that is opened. Characters that
    the locale does not have are printed as escapes (\\u0391), whatever prints them: site names may hold any.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115  (for as long as the process lives)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # it is full, closed, or of a process that forked this one
                stream.reconfigure(errors="backslashreplace")
    tell_fatal_signals()


def tell_fatal_signals() -> None:
    """SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL: no Python runs any more, so the handler is C's, and says the stacks.
    Who has set it already (pytest, a debugger) keeps it."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # stderr is no file (a notebook)
            faulthandler.enable()


def say(text: str) -> None:
    """One message on stderr; a stream that is closed, full or broken takes none, and that is all."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """Exit at once, without the clean-up that would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
