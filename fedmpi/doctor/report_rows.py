"""The rows of the report of `fedmpi doctor`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL = " ", "?", "!"  # FAIL keeps the given config from running; WARN may do harm, or could not be found out
LEGEND = f"{FAIL} keeps the config from running   {WARN} may do harm, or could not be found out"
WIDTH = 14


class Row(NamedTuple):
    name: str
    text: str
    mark: str = OK


def shown(line: Row) -> str:
    """Format a row as mark, name and text, with further lines indented.

    Control characters and the path of the home directory are replaced, as the report may go into a bug report.
    """
    text, home = line.text.strip(), os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\s|$)", "~", text)
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)
    return f"{line.mark} {line.name:<{WIDTH}} {text}".replace("\n", f"\n{'':{WIDTH + 3}}").rstrip()


def joined(parts: Iterable[str]) -> str:
    """Join the parts that are not empty by commas."""
    return ", ".join(part for part in parts if part)


def one_line(error: BaseException) -> str:
    """Return type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".rstrip(": ")
