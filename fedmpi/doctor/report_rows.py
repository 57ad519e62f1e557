"""Print the report of `fedmpi doctor`: software, launchers and MPI, the machine, and what a config would use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fedmpi.comm.launchers import detect
from fedmpi.common.errors import UserError
from fedmpi.doctor import FAIL, OK, WARN, ReportRow, config_checks, machine

LEGEND = f"{FAIL} the config cannot run   {WARN} a possible problem, or a check that failed"
NAME_WIDTH = 14
Check = Callable[[], Iterable[ReportRow]]


def print_report(show: Callable[[str], None], config: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Print the report of `fedmpi doctor` on rank 0; return the exit code: 1 if the config cannot run here, else 0.

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
        "software": (machine.report_software, machine.report_torch_and_gpus),
        "ranks": (machine.report_job, machine.report_launchers),
        "machine": (machine.report_cores_and_memory, machine.report_free_disk_space, machine.report_network),
    }
    if config is not None:
        groups["config"] = (lambda: config_checks.check_config(str(config), *overrides),)
    marks = set()
    for title, checks in groups.items():
        show(title)
        for row in (row for check in checks for row in _run_check(check, title)):
            show(format_row(row))
            marks.add(row.mark)
    if marks - {OK}:
        show(LEGEND)
    return int(FAIL in marks)


def _run_check(check: Check, title: str) -> Iterator[ReportRow]:
    """Yield the rows of a check; if it raises an error, yield a row about the error at the end."""
    try:
        yield from check()
    except Exception as error:
        name = "config" if title == "config" else getattr(check, "__name__", title).removeprefix("report_")
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield ReportRow(name, f"check failed: {reason}", FAIL if title == "config" else WARN)


def format_row(row: ReportRow) -> str:
    """Format a row as mark, name and text; lines of the text after the first are indented.

    Control characters and the path of the home directory are replaced, because users may publish the report.
    """
    text, home = row.text.strip(), os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\s|$)", "~", text)
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)
    return f"{row.mark} {row.name:<{NAME_WIDTH}} {text}".replace("\n", f"\n{'':{NAME_WIDTH + 3}}").rstrip()
