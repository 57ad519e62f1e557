"""What this machine has, and what a config would use on it: `fedmpi doctor`; what a run would need: `fedmpi plan`."""

from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL = " ", "?", "!"


class Row(NamedTuple):
    """A line of the report. FAIL keeps the given config from running; WARN may do harm, or could not be found out."""

    name: str
    text: str
    mark: str = OK


def joined(parts: Iterable[str]) -> str:
    """Join the parts that are not empty by commas."""
    return ", ".join(part for part in parts if part)
