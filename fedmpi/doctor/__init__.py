"""Report on this machine and on what a config would use here (`fedmpi doctor`), and estimate a run (`fedmpi plan`)."""

from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL = " ", "?", "!"


class ReportRow(NamedTuple):
    """One row of the report of `fedmpi doctor`.

    The mark FAIL means that the config cannot run. WARN means that there may be a problem, or that a check itself
    failed. Otherwise the mark is OK.
    """

    name: str
    text: str
    mark: str = OK


def join_nonempty(parts: Iterable[str]) -> str:
    """Join all parts that are not empty, separated by commas."""
    return ", ".join(part for part in parts if part)
