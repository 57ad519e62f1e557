"""Which candidates of a sweep's `best` are chosen: by figures of validation rows, read from the runs' directories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, lower_is_better
from fedmpi.config import Settings
from fedmpi.config.sweep import Best, Sweep
from fedmpi.runtime.sweeping import progress

FILE = "best.json"


@dataclass
class Choice:
    """Of one cell. values: of each candidate the figure by run, nan where it has diverged; missing: runs not done."""

    cell: dict[str, str]
    values: list[dict[str, float]] = field(default_factory=list)
    missing: int = 0
    chosen: dict[str, str] | None = None

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {label}" for name, label in self.cell.items()) or "all"


def choose(sweep: Sweep) -> dict[tuple[str, ...], Choice]:
    """Each cell's, as far as its runs are done. Raises UserError where a run has no such figure."""
    best = sweep.best
    assert best is not None
    found: dict[tuple[str, ...], Choice] = {}
    lowest, falling = False, set[str]()
    for labels, settings in sweep.runs():
        state = progress.state(settings)
        cell = found.setdefault(best.cell(labels), Choice({name: labels[name] for name in best.per}))
        cell.values = cell.values or [{} for _ in best.candidates]
        if state.what != progress.DONE and not state.diverged:
            cell.missing += 1
            continue
        at = best.candidates.index({axis.name: labels[axis.name] for axis in best.axes})
        cell.values[at][settings.name] = _value(best, state, settings)
        goal = settings.evaluate.best.goal if settings.evaluate.best.metric == best.by else "auto"
        falling.update(state.summary.get("falling", ()))
        lowest = lower_is_better(best.by, falling) if goal == "auto" else goal == "lowest"
    for cell in found.values():
        if not cell.missing:
            cell.chosen = _first_best(best, cell, -1 if lowest else 1)
    return found


def _value(best: Best, state: progress.State, settings: Settings) -> float:
    if state.diverged or state.summary.get("diverged") is not None:
        return math.nan
    if best.figure not in state.summary.get("last", {}):
        known = [name[11:] for name in state.summary.get("last", {}) if name.startswith("validation_")]
        said = f"best.by: {best.by}: the run {settings.name} has no {best.figure}"
        raise UserError(f"{said}; it has {', '.join(known)}" if known else f"{said}: set data.validation: 0.1, say")
    return state.figure(best.of, best.figure)


def _first_best(best: Best, cell: Choice, sign: int) -> dict[str, str] | None:
    means = [fmean(values.values()) for values in cell.values]
    whole = [at for at, mean in enumerate(means) if math.isfinite(mean)]
    return best.candidates[max(whole, key=lambda at: (sign * means[at], -at))] if whole else None


def final(sweep: Sweep) -> list[tuple[dict[str, str], Settings | None]]:
    """The runs that a table shows, by the labels of the sweep's own axes; None where nothing is chosen yet."""
    if sweep.best is None:
        return list(sweep.runs())
    chosen = choose(sweep)
    found: list[tuple[dict[str, str], Settings | None]] = []
    for labels in sweep.labels:
        candidate = chosen[sweep.best.cell(labels)].chosen
        found.append((labels, None if candidate is None else sweep.settings(labels | candidate)))
    return found


def told(choice: Choice) -> str:
    """`method fedavg: train.lr 0.1`"""
    if choice.chosen is None:
        why = f"{count(choice.missing, 'run')} not done" if choice.missing else "every candidate has diverged"
        return f"{choice.name}: not chosen, {why}"
    said = f"{choice.name}: " + ", ".join(f"{name} {label}" for name, label in choice.chosen.items())
    same = len(choice.values) > 1 and len({fmean(values.values()) for values in choice.values}) == 1
    return f"{said} (the first: all candidates have the same figure)" if same else said


def facts(sweep: Sweep, choices: Mapping[tuple[str, ...], Choice]) -> dict[str, Any]:
    """best.json: of each cell what was chosen, and by which figures."""
    best = sweep.best
    assert best is not None
    cells = [
        {
            "cell": each.cell,
            "chosen": each.chosen,
            "candidates": [
                {"labels": labels, "mean": fmean(values.values()) if values else None, "runs": values}
                for labels, values in zip(best.candidates, each.values, strict=True)
            ],
        }
        for each in choices.values()
    ]
    return {"by": best.figure, "of": best.of, "cells": cells}
