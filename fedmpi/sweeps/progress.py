"""The state and the figures of a sweep's runs, read from their directories; nothing else is kept about a sweep."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.config import Settings
from fedmpi.config.resume_rules import comparable, may_change
from fedmpi.config.schema import Analysis
from fedmpi.runtime import trust
from fedmpi.runtime.reading.files import json_of, tail
from fedmpi.runtime.record import plugins
from fedmpi.runtime.record.summary import summary

DONE, BEGUN, MISSING = "done", "begun", "missing"
REMEDY = "give the sweep another name, or move that directory away"
DIVERGED = re.compile(r"^diverged: |not finite|sent an update of norm")
TAIL = 1 << 18  # bytes; a line has a few kB
DIAGNOSTICS_OF = ("last", "mean_last_10")  # no value of a diagnostic is the best one


@dataclass(frozen=True)
class State:
    """One run's directory. rounds: that it has closed; summary: of a run that is done."""

    what: str
    rounds: int
    summary: dict[str, Any]
    reason: str  # why it ended, if it has

    @property
    def diverged(self) -> bool:
        """Whether its numbers have ended it: going on would end there again."""
        return self.what == BEGUN and DIVERGED.search(self.reason) is not None

    def figure(self, of: str, name: str) -> float:
        """One of summary.json (of: last, mean_last_10, best, selected) of a run that is done; nan where it has none,
        and where the last round's was no number: an earlier round's does not stand for it."""
        value = self.summary.get(of, {}).get(name)
        at = self.summary.get("last_round", {}).get(name)
        late = at is None or at >= self.summary.get("rounds", 0) - 1
        if value is None or not (late or of in ("best", "selected")):
            return math.nan
        return float(value)


def directory(settings: Settings) -> Path:
    return settings.output / settings.name


def identity(settings: Settings) -> dict[str, Any] | None:
    """What the run in the directory was made with; None where that is not known (yet)."""
    return json_of(directory(settings) / "identity.json")


def read_state(settings: Settings) -> State:
    """Raises UserError where the directory holds a run with other settings, or with more rounds."""
    place = directory(settings)
    if not place.exists():
        return State(MISSING, 0, {}, "")
    made = identity(settings)
    if made is None:
        return State(BEGUN, 0, {}, "")
    _check(settings, made, place)
    rounds = _rounds(place / "metrics.jsonl")
    if rounds > settings.rounds:
        raise UserError(
            f"{place} holds a run with {rounds} rounds, and the sweep now asks for {settings.rounds}; ask for "
            f"rounds={rounds}, {REMEDY}"
        )
    summary = json_of(place / "summary.json") or {}
    reason = str(summary.get("exit_reason", ""))
    finished = reason == "finished" and rounds >= settings.rounds
    patience = "evaluate.best.patience"
    enough = reason.startswith("enough: ") and made.get(patience) == settings.identity()[patience]
    return State(DONE if finished or enough else BEGUN, rounds, summary, reason)


def check_state(settings: Settings) -> State:
    """Return `read_state`; raise UserError also where the user's own code is not what that run was made with.

    A table of what is there does without this: the code may have changed after all of it.
    """
    found, accepts = read_state(settings), settings.checkpoint.changes == "accept"
    if accepts or not any(key.startswith("(plug-in ") for key in identity(settings) or ()):
        return found
    place = directory(settings)
    for file, copy in plugins.changed_files(place, trust.foreign(settings.model_dump(mode="json")).values()):
        raise UserError(
            f"{place} holds a run that was made with another content of {file}, which is in {copy}; undo the change, "
            f"{REMEDY}; to keep it all the same: checkpoint.changes=accept"
        )
    return found


def last_row(settings: Settings) -> dict[str, Any]:
    """The line of the last round that a run has closed; {} before the first one. Reads the file's end alone."""
    return next(reversed(tail(directory(settings) / "metrics.jsonl", TAIL)), {})


def rounds_done(settings: Settings) -> int:
    """How many rounds a run has closed."""
    return int(last_row(settings).get("round", -1)) + 1


def resuming(settings: Settings) -> Settings:
    """Return the settings of a run that goes on where an earlier one has left it."""
    resumed = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"resume": "auto"})})
    resumed._origins.update(settings._origins)
    resumed._file = settings._file
    return resumed


def is_diagnostic(metric: str) -> bool:
    """Whether a figure is one of analysis.jsonl, by its name.

    >>> is_diagnostic("losses.shift"), is_diagnostic("top.5"), is_diagnostic("losses")
    (True, False, False)
    """
    probe, dot, _ = metric.partition(".")
    return bool(dot) and probe in get_args(Analysis)


def diagnostics(settings: Settings) -> dict[str, Any]:
    """Return the numbers that `analysis` has measured of a run as figures with names, like the parts of summary.json.

    {"rounds": 10, "last": {"losses.shift": 0.4}, "last_round": {"losses.shift": 9}, "mean_last_10": {...}}; {} of a run
    that has measured nothing. Lists are left out, and so is a figure that is null, being no number in its round.
    """
    rows = [
        {"round": row["round"]}
        | {
            f"{probe}.{name}": value
            for probe, found in row.items()
            if isinstance(found, dict)
            for name, value in found.items()
            if type(value) in (int, float) and math.isfinite(value)
        }
        for row in read_jsonl(directory(settings) / "analysis.jsonl", rounds=True).rows
    ]
    if not rows:
        return {}
    names = list(dict.fromkeys(name for row in rows for name in row if name != "round"))
    found = summary(rows, names, "")
    return {"rounds": rows[-1]["round"] + 1, **{part: found[part] for part in (*DIAGNOSTICS_OF, "last_round")}}


def _check(settings: Settings, made: dict[str, Any], place: Path) -> None:
    """What is there was made with these settings; it may ask for more rounds."""
    own, made = comparable(settings.identity()), comparable(made)
    changed = _changed(own, made, settings)
    if changed:  # it may be in words alone: a run writes every option down
        from fedmpi.runtime.record.metadata import resolve  # imports torch

        own = comparable(resolve(settings).identity())
        changed = _changed(own, made, settings)
    if changed:
        key = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"{place} holds a run with {key}: {made[key]}, and the sweep now asks for {own[key]}{more}; {REMEDY}"
        )


def _changed(own: dict[str, str], made: dict[str, Any], settings: Settings) -> list[str]:
    return [key for key in own if key in made and made[key] != own[key] and not may_change(key, settings)]


def _rounds(path: Path) -> int:
    """How many rounds have a line; that of the initial model is none."""
    try:
        text = path.read_bytes()
    except OSError:
        return 0
    return text.count(b"\n") - text.startswith(b'{"round": -1,')
