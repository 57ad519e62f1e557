"""Read LEAF's JSON files one user at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from fedmpi.common.errors import UserError

REMEDY = "LEAF's preprocess.sh writes {'users': [...], 'user_data': {USER: {'x': [...], 'y': [...]}}}"

_BLANKS = re.compile(r"[ \t\n\r]*")


def read_users(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each user of a file with its entry of `user_data`, in the file's order.

    Only one user's numbers are Python objects at a time, because those of a whole file take several times its size.
    `num_samples` is ignored: LEAF's own scripts write wrong numbers for the test part of Shakespeare.

    Raises:
        UserError: the file cannot be read, is not JSON, or has no `user_data`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; {REMEDY}") from error
    found = False
    parser = _Parser(text)
    try:
        for key in parser.members():
            if key == "user_data":
                found = True
                for user in parser.members():
                    yield user, parser.value()
            else:
                parser.value()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}; {REMEDY}") from error
    if not found:
        raise UserError(f"{path} has no 'user_data'; {REMEDY}")


@final
class _Parser:
    """A position in a JSON text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.decoder = json.JSONDecoder()

    def value(self) -> Any:
        """Decode the value at the position and move behind it."""
        self._skip_blanks()
        value, self.at = self.decoder.raw_decode(self.text, self.at)
        return value

    def members(self) -> Iterator[str]:
        """Yield the keys of the object at the position; the caller moves behind the value of each."""
        self._read("{")
        if self._next_is("}"):
            self._read("}")
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise json.JSONDecodeError("a key is not a string", self.text, self.at)
            self._read(":")
            yield key
            if self._next_is("}"):
                self._read("}")
                return
            self._read(",")

    def _skip_blanks(self) -> None:
        blanks = _BLANKS.match(self.text, self.at)
        assert blanks is not None  # the pattern also matches nothing
        self.at = blanks.end()

    def _next_is(self, mark: str) -> bool:
        self._skip_blanks()
        return self.text.startswith(mark, self.at)

    def _read(self, mark: str) -> None:
        if not self._next_is(mark):
            raise json.JSONDecodeError(f"{mark!r} is expected", self.text, self.at)
        self.at += 1
