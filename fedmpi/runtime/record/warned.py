"""Warnings of a run go into its log.txt, too: who reads it in a month has no console any more."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fedmpi.common.errors import UserError

_before: list[str] = []  # what there was to say before there was a directory
_log: Callable[[str], None] = _before.append


@contextmanager
def heard() -> Iterator[None]:
    """Warnings are kept until the end of this; shown they are as ever. Then filters are as they were."""
    global _log
    show = warnings.showwarning

    def both(message: Warning | str, *where: Any, **more: Any) -> None:
        show(message, *where, **more)
        with suppress(UserError, ValueError):  # a full disk, of which the round's own line will tell
            _log(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = both
        try:
            yield
        finally:
            _before.clear()
            _log = _before.append


def into(log: Callable[[str], None]) -> None:
    """Log what was kept, and from now on each warning as it comes."""
    global _log
    for line in _before:
        log(line)
    _before.clear()
    _log = log
