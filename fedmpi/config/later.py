"""What a run may change when it goes on."""

from __future__ import annotations

from fedmpi.config.schema import Settings

# None of it moves a bit of the rounds to come (rounds may, by the schedule).
FREE_LATER = (
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


def free_later(key: str, settings: Settings) -> bool:
    """Whether this setting may be another one. With compute.pack not one of which clients are trained together."""
    return key.startswith(FREE_LATER) and not (settings.compute.pack != 1 and key in IN_GROUPS)
