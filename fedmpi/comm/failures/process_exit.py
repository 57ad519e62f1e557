"""Print a process's last message, and exit; both work even if the standard streams are closed or full."""

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

MPI_ABORT_TIMEOUT_S = 3.0  # time limit of MPI_Abort


@dataclass
class RankProcess:
    """Prints a rank's last message and ends its process if the job fails; tests replace it to run ranks as threads."""

    job: Job

    def print_message(self, text: str) -> None:
        print_message(text)

    def exit(self, code: int) -> NoReturn:
        exit_now(code)

    def end_job(self, code: int) -> NoReturn:
        """End this process and the job.

        Under MPI, MPI_Abort ends all ranks. torchrun and `srun --kill-on-bad-exit` end the other ranks when one rank
        exits with an error.
        """
        MPI = sys.modules.get("mpi4py.MPI")  # None if this process has not loaded MPI
        if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
            with open(os.devnull, "w") as nowhere:  # exit even if Abort waits for a dead launcher
                faulthandler.dump_traceback_later(MPI_ABORT_TIMEOUT_S, exit=True, file=nowhere)
                MPI.COMM_WORLD.Abort(code)
        exit_now(code)

    def exit_after_eviction(self) -> NoReturn:
        """End this rank because the others have regrouped without it."""
        if self.job.launcher == "mpi":  # if the rank ended in any other way, mpirun would end the whole job
            os.kill(os.getpid(), signal.SIGKILL)
        exit_now(1)

    def restore_sigterm(self) -> None:
        """Restore the default action of SIGTERM, so that the launcher can end this rank silently."""
        with contextlib.suppress(ValueError):  # only the main thread may set a signal handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def has_own_console(self) -> bool:
        """Return whether this rank's console does not show rank 0's output.

        This is the case on all hosts but rank 0's, unless the launcher collects the output of all hosts.
        """
        job = self.job
        if job.rank == job.local_rank or launchers.collects_output(job, os.environ):
            return False
        return job.launcher != "env://" or not network.is_local_address(os.environ["MASTER_ADDR"])

    def is_first_caller_on_host(self) -> bool:
        """Return whether this rank is the first of the living ranks on its host to call this method."""
        self._lock_socket = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            self._lock_socket.bind(f"\0fedmpi of {self.job.parent_pid}")
            return True
        return False


class _StandardFile(io.FileIO):
    """A file object for a standard stream; it discards output that cannot be written.

    If the disk is full (`> /dev/full`) or the reader has ended (`| head`), the command continues, and its exit code
    does not change.
    """

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written  # a non-blocking descriptor also returns None


def setup_stdio() -> None:
    r"""Ensure that writes to sys.stdout and sys.stderr never fail, and enable the fault handler.

    A standard stream that the shell has closed is replaced by the null device; otherwise the next file that is opened
    would get the stream's file descriptor. Characters that the locale cannot encode are printed as escapes (\u0391),
    because names of sites may contain any character.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is sys.__stdout__:  # a stream that a test or a notebook has installed is not replaced
        sys.stdout = _make_safe_stream(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _make_safe_stream(sys.stderr, 2)
    enable_fault_handler()


def _make_safe_stream(stream: Any, number: int) -> io.TextIOWrapper:
    """Return a text stream on file descriptor `number` whose writes never fail.

    stream: the stream to replace, which determines encoding and buffering; None if it was closed when Python started.
    """
    file, unbuffered = _StandardFile(number, "w", closefd=False), bool(stream and stream.write_through)
    return io.TextIOWrapper(
        file if unbuffered else io.BufferedWriter(file),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=bool(stream and stream.line_buffering),
        write_through=unbuffered,
    )


def enable_fault_handler() -> None:
    """Enable Python's fault handler, unless pytest or a debugger has already done so.

    It prints the stacks of all threads on a fatal signal such as SIGSEGV.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # in a notebook stderr is no file
            faulthandler.enable()


def print_message(text: str, stream: TextIO | None = None) -> None:
    """Print a line to stderr or another stream; do nothing if the stream is closed, full or has no reader.

    This also works in Python programs that use fedmpi without `setup_stdio`.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream = stream or sys.stderr
        encoding = stream.encoding or "utf-8"
        stream.write(f"{text.rstrip()}\n".encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def exit_now(code: int) -> NoReturn:
    """Exit immediately, without Python's clean-up, which could wait for lost ranks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
