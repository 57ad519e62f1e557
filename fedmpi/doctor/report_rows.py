"""The report of `fedmpi doctor`: software, launchers and MPI, the machine, and what a config would use there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fedmpi.comm.launchers import detect
from fedmpi.common.errors import UserError
from fedmpi.doctor import FAIL, OK, WARN, Row, config_checks, machine

LEGEND = f"{FAIL} keeps the config from running   {WARN} may do harm, or could not be found out"
WIDTH = 14
Check = Callable[[], Iterable[Row]]


def report(show: Callable[[str], None], config: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Print the report of `fedmpi doctor` on rank 0, and return the exit code: 1 if the config cannot run here.

    Args:
        show: prints one line.
        config: the config file, or None for a report on the machine only.
        overrides: KEY=VALUE settings that replace those of the file.
    """
    try:
        if detect(os.environ).rank:
            return 0
    except UserError:  # reported in a row
        pass
    groups: dict[str, tuple[Check, ...]] = {
        "software": (machine.software, machine.torch),
        "ranks": (machine.started, machine.launchers),
        "machine": (machine.processors_and_memory, machine.disks, machine.network_names),
    }
    if config is not None:
        groups["config"] = (lambda: config_checks.config(str(config), *overrides),)
    marks = set()
    for title, checks in groups.items():
        show(title)
        for row in (row for check in checks for row in _rows(check, title)):
            show(format_row(row))
            marks.add(row.mark)
    if marks - {OK}:
        show(LEGEND)
    return int(FAIL in marks)


def _rows(check: Check, title: str) -> Iterator[Row]:
    """Yield the rows of a check; if the check raises an error, yield a row with that error at the end."""
    try:
        yield from check()
    except Exception as error:
        name = "config" if title == "config" else getattr(check, "__name__", title)
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield Row(name, f"could not be found out: {reason}", FAIL if title == "config" else WARN)


def format_row(row: Row) -> str:
    """Format a row as mark, name and text, and indent further lines of the text.

    Control characters and the path of the home directory are replaced, since users may publish the report in an issue.
    """
    text, home = row.text.strip(), os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\s|$)", "~", text)
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)
    return f"{row.mark} {row.name:<{WIDTH}} {text}".replace("\n", f"\n{'':{WIDTH + 3}}").rstrip()
