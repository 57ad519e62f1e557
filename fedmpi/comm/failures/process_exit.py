"""The end of a process: its last message, and its exit. Neither may fail, whatever became of its standard streams."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from fedmpi.comm import launchers, network
from fedmpi.comm.launchers import Job

ABORT_S = 3.0  # allowed for MPI_Abort


@dataclass
class Process:
    """What a rank does to its own process when the job fails. Tests of ranks as threads replace it."""

    job: Job

    def say(self, text: str) -> None:
        say(text)

    def exit(self, code: int) -> NoReturn:
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
        if job.rank == job.local_rank or launchers.collects_output(job, os.environ):
            return False
        return job.launcher != "env://" or not network.is_own(os.environ["MASTER_ADDR"])

    def is_first_of_host(self) -> bool:
        """Return whether no other living rank of this host has asked before."""
        self._lock_socket = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            self._lock_socket.bind(f"\0fedmpi of {self.job.parent_pid}")
            return True
        return False


class _StandardFile(io.FileIO):
    """The file behind a standard stream. It may be full (`> /dev/full`) or without a reader (`| head`); then what is
    written is dropped, and the command goes on and ends as it would have."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written  # None also comes from a descriptor that does not block


def setup_stdio() -> None:
    """Make printing safe in this process, and let a fatal signal print the stacks of all threads on stderr.

    From here on no write to sys.stdout or sys.stderr fails, whoever prints. Where the shell has closed a standard
    stream, its number would go to the next file that is opened. Characters that the locale does not have are printed
    as escapes (\\u0391): site names may hold any.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is sys.__stdout__:  # a stream that replaces it (a test's, a notebook's) stays
        sys.stdout = _safe_stream(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _safe_stream(sys.stderr, 2)
    tell_fatal_signals()


def _safe_stream(stream: Any, number: int) -> io.TextIOWrapper:
    """Return a stream on a file descriptor with the options of `stream`; None: it was closed when Python started."""
    file, unbuffered = _StandardFile(number, "w", closefd=False), bool(stream and stream.write_through)
    return io.TextIOWrapper(
        file if unbuffered else io.BufferedWriter(file),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=bool(stream and stream.line_buffering),
        write_through=unbuffered,
    )


def tell_fatal_signals() -> None:
    """Print the stacks of all threads at SIGSEGV, SIGABRT and the like, unless pytest or a debugger does so already."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # stderr is no file (a notebook)
            faulthandler.enable()


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on stderr by default; a stream that is closed, full or without a reader drops it.

    This holds in programs that use fedmpi from Python, too, whose streams `setup_stdio` does not touch.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream = stream or sys.stderr
        encoding = stream.encoding or "utf-8"
        stream.write(f"{text.rstrip()}\n".encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def leave(code: int) -> NoReturn:
    """Exit at once, without the clean-up that would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
