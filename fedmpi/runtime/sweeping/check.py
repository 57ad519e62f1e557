"""`fedmpi validate` of a sweep: every run's settings, and all else of so many runs that each label occurs."""

from __future__ import annotations

from collections.abc import Callable

from fedmpi import models, tasks
from fedmpi.common import registry
from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import count
from fedmpi.config import Settings
from fedmpi.config.sweep import Sweep
from fedmpi.runtime import build
from fedmpi.runtime.validate import validate_settings


def validate(sweep: Sweep, say: Callable[[str], None]) -> None:
    """Raises UserError for a mistake, naming the run; at the end MissingDataError, where only data are missing."""
    every = [settings for _, settings in sweep.runs()]
    say(f"{count(len(every), 'run')}, to be written to {every[0].output}")
    for axis in sweep.axes:
        used = [label for label in axis.choices if any(each[axis.name] == label for each in sweep.labels)]
        say(f"  {axis.name}: {', '.join(used)}")
    if sweep.published:
        figures = sum(len(each.values) for each in sweep.published)
        say(f"  published: {count(figures, 'figure')} of {sweep.published[0].source}")
    missing: dict[str, list[str]] = {}
    for labels in sweep.covering():
        settings = sweep.settings(labels)
        try:
            validate_settings(settings)
        except UserError as error:
            if not _is_missing(error):
                raise UserError(f"{error}\n  in the run {settings.name}") from error
            missing.setdefault(str(error), []).append(settings.name)
            _without_data(settings)
    if missing:
        told = "".join(
            f"\n  {text} (for {count(len(runs), 'run')} such as {runs[0]})" for text, runs in missing.items()
        )
        raise MissingDataError(f"{sweep.path}: nothing is wrong but that data are missing:{told}")
    say("ok")


def _is_missing(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, MissingDataError) or _is_missing(error.__cause__))


def _without_data(settings: Settings) -> None:
    """What can be checked of a run whose data are not here: names and options."""
    build.make_method(settings)
    for kind, chosen, key in ((models.KIND, settings.model, "model"), (tasks.KIND, settings.task, "task")):
        registry.make(kind, chosen, settings.origins(key))
