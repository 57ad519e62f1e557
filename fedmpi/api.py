"""fedmpi from Python: in a notebook, in a script, or on the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedmpi import config
from fedmpi.analysis.pages import report
from fedmpi.common.errors import UserError
from fedmpi.runtime import launch
from fedmpi.runtime.record.saved_model import load

__all__ = ["Summary", "load", "run"]


class Summary(dict[str, Any]):
    """The contents of a run's summary.json, and `directory`, its path; empty on ranks other than 0."""


def run(settings: str | Path | config.Settings, overrides: Sequence[str] = ()) -> Summary:
    """Run one experiment; the ranks are found as on the command line (without a launcher: one process).

    Args:
        settings: a YAML file, or settings made by `fedmpi.config.load`.
        overrides: as on the command line, `["train.epochs=3"]`.

    Raises:
        UserError: a mistake in config or data.
    """
    if isinstance(overrides, str) or not all(isinstance(each, str) for each in overrides):
        raise UserError(f"fedmpi.run: overrides is {overrides!r}; a list of texts is needed: ['train.epochs=3']")
    if isinstance(settings, config.Settings):
        if overrides:
            raise UserError("fedmpi.run: these settings are made; give the overrides to fedmpi.config.load")
    elif isinstance(settings, (str, Path)):
        settings = config.load(settings, overrides)
    else:
        made = type(settings).__name__
        raise UserError(f"fedmpi.run: settings is {made}; a YAML file, or what fedmpi.config.load makes, is needed")
    return Summary(launch.execute(settings, after=partial(report.after_run, settings))[0])
