"""Whether the runs that a table puts together were made with one code and the same data."""

from __future__ import annotations

from collections.abc import Iterable

from fedmpi.common.errors import UserError
from fedmpi.config import Settings
from fedmpi.config.sweep import Sweep
from fedmpi.runtime.reading import digests
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.sweeping import progress


def notes(sweep: Sweep, shown: Iterable[Settings]) -> list[str]:
    """What has to stand beside a table of these runs. Raises UserError where a mean would be over two things.

    Other versions of fedmpi and torch are no reason to refuse: most of their changes concern no run of the sweep. With
    checkpoint.changes=accept nothing is.
    """
    runs = {settings.name: settings for settings in shown}
    if sweep.best is not None:  # those by which was chosen count, too
        runs |= {settings.name: settings for _, settings in sweep.runs()}
    made = [(settings, found) for settings in runs.values() if (found := progress.identity(settings)) is not None]
    said, accepted = list[str](), all(settings.checkpoint.changes == "accept" for settings in runs.values())
    for item, (first, other) in digests.differences(made).items():
        told = f"{first} and {other} differ in {item[1:-1]}"
        if item not in (digests.CODE, digests.TORCH) and not accepted:
            raise UserError(
                f"{progress.directory(made[0][0]).parent}: {told}, and a mean would be over both. Move those with the "
                "old one away and let `fedmpi sweep` train them again, leave some out (only, leave_out), or put them "
                "together all the same with checkpoint.changes=accept"
            )
        said.append(f"mixed: {told}")
    for name, settings in runs.items():
        changes = RunDirectory(progress.directory(settings)).accepted()
        said += [f"mixed: {name}: {'; '.join(changes)}"] if changes else []
    return said
