"""The last words of a process, and its end; neither may fail, whatever has become of its standard streams."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from typing import NoReturn


def prepare() -> None:
    """Standard streams that are there, and the stacks of all threads on stderr where a fatal signal ends the process.

    Where the shell has closed one of the streams, its number would go to the next file that is opened.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115  (for as long as the process lives)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
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
