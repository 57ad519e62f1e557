"""What a run may change when it goes on."""

from __future__ import annotations

from fedmpi.config.schema import Settings

# None of it moves a bit of the rounds that are done, or to come.
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


def by_rounds(settings: Settings) -> str:
    """What depends on how many rounds there are in all, so that those that are done would have been others; or ""."""
    if settings.train.schedule in ("cosine", "step"):
        return f"train.schedule: {settings.train.schedule} has its course over all rounds"
    return "method ccvr ends with the last round" if settings.method.name == "ccvr" else ""


def free_later(key: str, settings: Settings) -> bool:
    """Whether this setting may be another one. With compute.pack not one of which clients are trained together."""
    if key == "rounds" and by_rounds(settings):
        return False
    return key.startswith(FREE_LATER) and not (settings.compute.pack != 1 and key in IN_GROUPS)
