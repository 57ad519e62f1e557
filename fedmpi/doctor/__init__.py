"""Reports on this machine and what a config would use on it (`fedmpi doctor`), and on a run's needs (`fedmpi plan`)."""

from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL = " ", "?", "!"


class ReportRow(NamedTuple):
    """A line of the report: its name, its text and its mark.

    FAIL marks a problem that keeps the config from running; WARN marks a possible problem, or a failed check.
    """

    name: str
    text: str
    mark: str = OK


def join_nonempty(parts: Iterable[str]) -> str:
    """Join the parts that are not empty, separated by commas."""
    return ", ".join(part for part in parts if part)
