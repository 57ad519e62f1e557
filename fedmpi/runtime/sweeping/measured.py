"""What `analysis` has measured of a run, as figures with names: `losses.shift`, as in summary.json."""

from __future__ import annotations

import math
from typing import Any, get_args

from fedmpi.common.jsonl import read_jsonl
from fedmpi.config import Settings
from fedmpi.config.schema import Analysis
from fedmpi.runtime.record.summary import summary
from fedmpi.runtime.sweeping import progress

OF = ("last", "mean_last_10")  # nothing of it is best: more drift is neither better nor worse


def named(metric: str) -> bool:
    """Whether a figure is of analysis.jsonl, by its name.

    >>> named("losses.shift"), named("top.5"), named("losses")
    (True, False, False)
    """
    probe, dot, _ = metric.partition(".")
    return bool(dot) and probe in get_args(Analysis)


def figures(settings: Settings) -> dict[str, Any]:
    """The numbers of analysis.jsonl that stand alone (no lists), under the parts of summary.json that are in OF.

    {"rounds": 10, "last": {"losses.shift": 0.4}, "last_round": {"losses.shift": 9}, "mean_last_10": {...}}; {} of a run
    that has measured nothing. A figure that is null, being no number in its round, is none of that round.
    """
    rows = [_flat(row) for row in read_jsonl(progress.directory(settings) / "analysis.jsonl", rounds=True).rows]
    if not rows:
        return {}
    names = list(dict.fromkeys(name for row in rows for name in row if name != "round"))
    said = summary(rows, names, "")
    return {"rounds": rows[-1]["round"] + 1, **{part: said[part] for part in (*OF, "last_round")}}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"round": row["round"]}
    for probe, said in row.items():
        if isinstance(said, dict):
            found |= {f"{probe}.{name}": value for name, value in said.items() if _is_number(value)}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
