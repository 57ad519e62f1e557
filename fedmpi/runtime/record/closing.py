"""The last word of a run that fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fedmpi.runtime.record import report_text
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.record.summary import judged_first, summary


def close_failed(directory: RunDirectory, falling: Collection[str], judged: Sequence[str], reason: str) -> str:
    """A run that fails leaves whole lines and a summary of the rounds that it has done. Returns how to go on, if so."""
    if directory.end():
        rows = directory.metrics()
        names, best = judged_first(report_text.figures_in(rows), judged), directory.best_model()
        facts = summary(rows, names, f"failed: {reason}", directory.losses(), best, falling)
        directory.write_summary(facts)
        if any(directory.path.glob("checkpoints/[0-9]*")):
            return f"go on with: fedmpi resume {directory.shown}"
    return ""
