"""Where a run began: what its config calls by a relative path is looked for from there, though a plug-in's os.chdir may
have led elsewhere since."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_here: str | None = None


@contextmanager
def here() -> Iterator[None]:
    """A run begins, in the working directory of now."""
    global _here
    before, _here = _here, os.getcwd()
    try:
        yield
    finally:
        _here = before


def at(place: str | Path) -> Path:
    """The place, as it was given where the process is still there; else its absolute path."""
    return Path(place) if _here is None or _still(_here) else Path(_here, place)


def fixed(place: str | Path) -> Path:
    """Its absolute path, for what is used again later."""
    return at(place).absolute()


def _still(directory: str) -> bool:
    try:
        return os.getcwd() == directory
    except FileNotFoundError:  # a temporary one, which is gone
        return False
