"""Decide which settings may change when a run is resumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedmpi.config.schema import Settings

# Keys and prefixes of keys that do not influence the bits of a round.
MAY_CHANGE_ON_RESUME = (
    "rounds",
    "name",
    "checkpoint.",
    "evaluate.best.patience",
    "faults.on_lost_rank",
    "client_state.",
    "comm.backend",
    "comm.start_timeout_s",
    "comm.round_timeout_s",
    "cohort.placement",
    "trace",
    "record.",
    "report",
    "loggers",
    "callbacks",
    "server.placement",
    "server.trains_clients",
    "compute.device",
    "compute.gradient_checkpointing",
)
# Keys that influence which clients are trained at once.
AFFECTS_CLIENT_BATCHES = ("client_state.max_gib", "cohort.placement", "server.trains_clients")


def why_rounds_are_fixed(settings: Settings) -> str:
    """Return the reason why the results of past rounds depend on the total number of rounds; "" if they do not."""
    if settings.train.schedule in ("cosine", "step"):
        return f"train.schedule: {settings.train.schedule} depends on the total number of rounds"
    if settings.privacy.dp is not None and settings.privacy.dp.epsilon is not None:
        return "the noise that reaches privacy.dp.epsilon depends on the total number of rounds"
    return "method ccvr calibrates the model in the last round" if settings.method.name == "ccvr" else ""


def may_change_on_resume(key: str, settings: Settings) -> bool:
    """Return whether a setting may change when a run is resumed.

    Keys that influence which clients are trained together may change only if compute.clients_per_pass is 1.
    """
    if key == "rounds" and why_rounds_are_fixed(settings):
        return False
    return key.startswith(MAY_CHANGE_ON_RESUME) and not (
        settings.compute.clients_per_pass != 1 and key in AFFECTS_CLIENT_BATCHES
    )


QUOTED_PATH = re.compile(r"""(['"])/(?:.*/)?([^/]+)\1""")  # a path of a file in identity.json


def normalize_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `Settings.identity` in a form that does not depend on the folder of the project.

    Absolute paths are reduced to file names, because a project may be moved before a run is resumed; the contents of
    the files are compared by separate digests.

    >>> normalize_identity({"model.name": "'/home/me/own.py:net'", "data.path": "'/data/a.csv'", "train.lr": "0.1"})
    {'model.name': "'own.py:net'", 'data.path': "'a.csv'", 'train.lr': '0.1'}
    """
    items = {}
    for key, text in identity.items():
        path = QUOTED_PATH.fullmatch(text) if isinstance(text, str) else None
        of_data = key.startswith("data.") or key.endswith(".replay")
        items[key] = repr(path[2]) if path and (of_data or ".py:" in path[2]) else text
    return items
