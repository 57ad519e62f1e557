"""HTML reports of runs and sweeps, and, for a consortium, a page for each site and a model card."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.config import Settings


def write_report_after_run(settings: Settings, result: Mapping[str, Any]) -> Path | None:
    """Write report.html at the end of a run, unless the config has `report: false`, and return its path.

    An error becomes a warning, since the results of the run are complete without the page.

    Args:
        settings: the settings of the run.
        result: the result of `execute` in runtime/execute.py; {} on ranks other than 0, which write nothing.

    Returns:
        The path of the page, relative to the working directory of the run; None if no page was written.
    """
    if not settings.report or "directory" not in result:
        return None
    directory = Path(result["directory"])
    try:
        from fedmpi.reports import report, run_groups
        from fedmpi.runtime.record import atomic_files

        page = report.render_report(run_groups.read_runs([settings.working_dir / directory]))
        to = directory / report.REPORT
        atomic_files.write_atomically(settings.working_dir / to, page.encode())
        return to
    except Exception as error:
        text = f"report: {directory}/report.html was not written ({error!r}); the run is complete without it"
        warnings.warn(f"{text}. To write it now: fedmpi report {directory}", stacklevel=2)
        return None
