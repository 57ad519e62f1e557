"""Paths that are not there, but are in another spelling."""

import os
import unicodedata
from pathlib import Path


def other_spelling(path: Path) -> str:
    """Return what to add to the message on a missing path that is there in another case or Unicode form; else ""."""
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
