"""Where a run began: what its config calls by a relative path is looked for from there, though a plug-in's os.chdir may
have led elsewhere since. And what to say of a path that is not there but in its spelling."""

import os
import unicodedata
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


def other_spelling(path: Path) -> str:
    """What to say of a path that is not there, but is with other letters' case or in another Unicode form; else ""."""
    there = _spelled_otherwise(path)
    if there is None or there == path:
        return ""
    same_letters = unicodedata.normalize("NFC", str(there)) == unicodedata.normalize("NFC", str(path))
    how = "the same letters in another Unicode form, NFC or NFD" if same_letters else "other capital or small letters"
    return f", but {there} ({how}; names must agree)"


def _spelled_otherwise(path: Path) -> Path | None:
    if os.path.lexists(path):
        return path
    home = _spelled_otherwise(path.parent) if path.parent != path else None
    try:
        names = sorted(os.listdir(home)) if home is not None else []
    except OSError:  # no folder, or one that may not be read
        return None
    found = next((name for name in names if _folded(name) == _folded(path.name)), None)
    return None if home is None or found is None else home / found


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _still(directory: str) -> bool:
    try:
        return os.getcwd() == directory
    except FileNotFoundError:  # a temporary one, which is gone
        return False
