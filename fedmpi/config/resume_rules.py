"""What a run may change when it goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedmpi.config.schema import Settings

# None of it moves a bit of the rounds that are done, or to come.
MAY_CHANGE = (
    "rounds",
    "name",
    "checkpoint.",
    "evaluate.best.patience",
    "faults.on_lost_rank",
    "state.",
    "comm.backend",
    "comm.start_timeout_s",
    "comm.round_timeout_s",
    "cohort.placement",
    "timeline",
    "record.",
    "report",
    "track",
    "callbacks",
    "server.placement",
    "server.trains",
    "compute.device",
)
IN_GROUPS = ("state.memory", "cohort.placement", "server.trains")  # of these it depends who is trained together


def depends_on_rounds(settings: Settings) -> str:
    """What depends on how many rounds there are in all, so that those that are done would have been others; or ""."""
    if settings.train.schedule in ("cosine", "step"):
        return f"train.schedule: {settings.train.schedule} has its course over all rounds"
    return "method ccvr ends with the last round" if settings.method.name == "ccvr" else ""


def may_change(key: str, settings: Settings) -> bool:
    """Whether this setting may be another one. With compute.pack not one of which clients are trained together."""
    if key == "rounds" and depends_on_rounds(settings):
        return False
    return key.startswith(MAY_CHANGE) and not (settings.compute.pack != 1 and key in IN_GROUPS)


PLACE = re.compile(r"""(['"])/(?:.*/)?([^/]+)\1""")  # of a file, as identity.json has it


def comparable(made: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, as `Settings.identity` gives them, as they are compared with those of another start.

    Of a file that a setting names by its absolute path only the name counts: projects are moved, and what the file
    holds is compared by a digest of its own.

    >>> comparable({"model.name": "'/home/me/own.py:net'", "data.path": "'/data/a.csv'", "train.lr": "0.1"})
    {'model.name': "'own.py:net'", 'data.path': "'a.csv'", 'train.lr': '0.1'}
    """
    found = {}
    for key, text in made.items():
        place = PLACE.fullmatch(text) if isinstance(text, str) else None
        of_data = key.startswith("data.") or key.endswith(".replay")
        found[key] = repr(place[2]) if place and (of_data or ".py:" in place[2]) else text
    return found
