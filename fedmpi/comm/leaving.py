"""The last words of a process, and its end; neither may fail, whatever has become of its standard streams."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


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
