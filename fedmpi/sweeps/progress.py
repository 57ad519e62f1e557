"""Read the state and the metrics of each run of a sweep from the run's directory, which is the only record."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.type_descriptions import describe_stored_value
from fedmpi.config import Settings
from fedmpi.config.resume_rules import may_change_on_resume, normalize_identity
from fedmpi.config.schema import Analysis
from fedmpi.runtime.inspection.run_files import check_written_by_this_version, read_json_object, read_last_rows
from fedmpi.runtime.record.summary import summarize_run

DONE, STARTED, MISSING = "done", "started", "missing"
RENAME_OR_MOVE = "give the sweep another name, or move that directory away"  # remedy in messages
DIVERGENCE_REASON = re.compile(r"^diverged: |not finite|sent an update of norm")
TAIL_BYTES = 1 << 18  # bytes; a line has a few kB


@dataclass(frozen=True)
class RunState:
    """The state of a run, as recorded in its directory."""

    status: str  # DONE, STARTED or MISSING
    rounds: int  # number of finished rounds
    summary: dict[str, Any]  # the content of summary.json; {} if there is none
    reason: str  # why the run ended; "" if it has not

    @property
    def diverged(self) -> bool:
        """Whether the run ended because it diverged; if it were resumed, it would diverge again."""
        return self.status == STARTED and DIVERGENCE_REASON.search(self.reason) is not None

    def get_metric(self, summary_part: str, name: str) -> float:
        """Return the metric `name` from summary.json; nan if it is missing or out of date.

        Args:
            summary_part: the section of summary.json: last, mean_last_10, best or selected. In last and mean_last_10, a
                metric is out of date if it was not measured after the last round.
        """
        value = self.summary.get(summary_part, {}).get(name)
        last_round = self.summary.get("last_round", {}).get(name)
        is_current = last_round is None or last_round >= self.summary.get("rounds", 0) - 1
        return math.nan if value is None or not (is_current or summary_part in ("best", "selected")) else float(value)


def get_run_directory(settings: Settings) -> Path:
    """Return the directory of a run of a sweep."""
    return settings.output / settings.name


def read_identity(settings: Settings) -> dict[str, Any] | None:
    """Return the settings with which a run was started, from its identity.json; None if there is no such file."""
    return read_json_object(get_run_directory(settings) / "identity.json")


def read_state(settings: Settings) -> RunState:
    """Read the state of a run from its directory.

    Raises:
        UserError: if the directory contains a run with other settings, with more rounds, or of an earlier version
            of fedmpi.
    """
    place = get_run_directory(settings)
    recorded = read_identity(settings)
    if recorded is None:
        return RunState(STARTED if place.exists() else MISSING, 0, {}, "")
    check_written_by_this_version(place, recorded)
    if changed := _describe_changed_settings(settings, normalize_identity(recorded)):
        raise UserError(f"{place} contains a run with other settings: {changed}; {RENAME_OR_MOVE}")
    rounds = count_finished_rounds(settings)
    if rounds > settings.rounds:
        raise UserError(
            f"{place} contains a run with {rounds} rounds, but the sweep has rounds: {settings.rounds}; set "
            f"rounds={rounds}, {RENAME_OR_MOVE}"
        )
    summary = read_json_object(place / "summary.json") or {}
    reason = str(summary.get("exit_reason", ""))
    finished = reason == "finished" and rounds >= settings.rounds
    patience = "evaluate.best.patience"
    enough = reason.startswith("early_stopped: ") and recorded.get(patience) == settings.identity()[patience]
    return RunState(DONE if finished or enough else STARTED, rounds, summary, reason)


def _describe_changed_settings(settings: Settings, recorded: dict[str, Any]) -> str:
    """Describe the first setting that differs from the recorded run, and the number of others that differ.

    The result is "" if no setting differs. Settings that may be changed when a run is resumed, such as the number of
    rounds, are not compared.
    """

    def list_differences(requested: Settings) -> list[str]:
        requested_values = normalize_identity(requested.identity())
        changed = [
            key
            for key in requested_values
            if recorded.get(key, requested_values[key]) != requested_values[key]
            and not may_change_on_resume(key, settings)
        ]
        return [
            f"{key} is {describe_stored_value(recorded[key])} there, but "
            f"{describe_stored_value(requested_values[key])} in the sweep"
            for key in changed
        ]

    changed = list_differences(settings)
    if changed:  # runs record all defaults, so compare again after filling in the defaults of the sweep's settings
        from fedmpi.runtime.record.metadata import resolve_settings  # imports torch

        changed = list_differences(resolve_settings(settings))
    return f"{changed[0]} and {len(changed) - 1} more" if len(changed) > 1 else "".join(changed)


def read_last_row(settings: Settings) -> dict[str, Any]:
    """Read the row of the last finished round from the end of metrics.jsonl; {} if no round has finished."""
    return next(reversed(read_last_rows(get_run_directory(settings) / "metrics.jsonl", TAIL_BYTES)), {})


def count_finished_rounds(settings: Settings) -> int:
    """Return the number of finished rounds of a run."""
    return int(read_last_row(settings).get("round", -1)) + 1


def enable_auto_resume(settings: Settings) -> Settings:
    """Return a copy of the settings with checkpoint.resume: auto, which resumes the run if it has a checkpoint."""
    return settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"resume": "auto"})})


def is_diagnostic(metric: str) -> bool:
    """Return whether a name denotes a diagnostic in analysis.jsonl rather than a metric in metrics.jsonl.

    >>> is_diagnostic("losses.shift"), is_diagnostic("top.5"), is_diagnostic("losses")
    (True, False, False)
    """
    probe, dot, _ = metric.partition(".")
    return bool(dot) and probe in get_args(Analysis)


def summarize_diagnostics(settings: Settings) -> dict[str, Any]:
    """Summarise the diagnostics in analysis.jsonl in the form of summary.json; lists of numbers are left out.

    Returns:
        A dict such as {"rounds": 10, "last": {"losses.shift": 0.4}, "last_round": {"losses.shift": 9}, "mean_last_10":
        {...}}; {} if the run has no diagnostics.
    """
    rows = []
    for line in read_jsonl(get_run_directory(settings) / "analysis.jsonl", need_round=True).rows:
        row = {"round": line["round"]}
        for probe, values in line.items():
            numbers = values.items() if isinstance(values, dict) else ()
            row |= {f"{probe}.{name}": v for name, v in numbers if type(v) in (int, float) and math.isfinite(v)}
        rows.append(row)
    if not rows:
        return {}
    names = list(dict.fromkeys(name for row in rows for name in row if name != "round"))
    return {**summarize_run(rows, names, ""), "rounds": rows[-1]["round"] + 1}
