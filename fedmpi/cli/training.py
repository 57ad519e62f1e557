"""What `fedmpi run` and the runs of a sweep do: train, then write the page of it."""

from typing import Any

import typer

from fedmpi.common.signals import COMMAND
from fedmpi.config import Settings


def train(settings: Settings) -> int:
    """Returns the exit code (runtime/launch.py)."""
    from fedmpi.runtime import launch

    def after(result: dict[str, Any]) -> None:
        from fedmpi.analysis.pages import report

        written = report.after_run(settings, result)
        if written is not None:
            typer.echo(f"report: {written}")

    return launch.execute(settings, COMMAND, after)[1]
