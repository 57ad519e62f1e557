"""A sweep in which each method has the best of a few settings, chosen on validation rows before its table is made.

    best:
      over: {train.lr: [0.01, 0.1]}     the candidates: axes, as in the sweep's own `over`; each combination is one
      by: accuracy                      validation_accuracy of each run, on the rows that data.validation holds out
      of: last                          after the last round; or mean_last_10, best (a round's)
      per: [method]                     axes whose labels have a choice of their own; default: all but `seed`
      using: {seed: [0]}                the runs by which is chosen, axis -> labels; default: all

The candidate with the best mean over the runs that are chosen by is taken; of equal ones the first. One of whose runs
has diverged, or ended without a number, is not taken. Test rows have no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, lower_is_better, nearest, show
from fedmpi.config import Settings, loading
from fedmpi.config.yaml_source import Document
from fedmpi.sweeps import progress
from fedmpi.sweeps.axes import SEED, Axis, read_axis, read_labels

FILE = "best.json"
KEYS = ("over", "by", "of", "per", "using")
OF = ("last", "mean_last_10", "best")


@dataclass(frozen=True)
class Best:
    """What is chosen, and how."""

    axes: tuple[Axis, ...]
    by: str
    of: str
    per: tuple[str, ...]
    using: dict[str, list[str]]

    @property
    def figure(self) -> str:
        return f"validation_{self.by}"

    @property
    def candidates(self) -> list[dict[str, str]]:
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, chosen, strict=True)) for chosen in product(*(axis.choices for axis in self.axes))]

    @property
    def measured(self) -> Document:
        """The lowest layer of each run: validation rows are evaluated."""
        return loading.nested("evaluate.best.metric", self.by, "best.by")

    def tunes(self, labels: Mapping[str, str]) -> bool:
        """Whether candidates are tried on a run."""
        return all(labels[name] in chosen for name, chosen in self.using.items())

    def cell(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """What a run shares its choice with."""
        return tuple(labels[name] for name in self.per)


def read(
    path: Path, document: Document, axes: Sequence[Axis], labels: Sequence[Mapping[str, str]], given: Any
) -> Best | None:
    """Read the section `best`. labels: of the sweep's runs. Raises UserError."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("over"), dict) or not given["over"]:
        raise UserError(
            f"{path}: best: {show(given)}; candidates are needed: {{over: {{train.lr: [0.01, 0.1]}}, by: accuracy}}"
        )
    if unknown := [str(key) for key in given if key not in KEYS]:
        raise UserError(f"{path}: best: unknown key '{unknown[0]}'; {nearest(unknown[0], KEYS)}")
    by, of = given.get("by"), given.get("of", "last")
    if not isinstance(by, str) or by.startswith(("validation_", "personal_", "test_")):
        raise UserError(f"{path}: best.by: {show(by)}; loss or a metric of the task is needed: by: accuracy")
    if of not in OF:
        raise UserError(f"{path}: best.of: {show(of)}; allowed: {', '.join(OF)}")
    names = [each.name for each in axes if each.name != SEED]
    for name in given["over"]:
        if name in (*names, SEED):
            raise UserError(f"{path}: best.over.{name}: is an axis of over, or the seed; candidates are of other keys")
    tried = tuple(read_axis(path, document, name, values, "best.over") for name, values in given["over"].items())
    per = given.get("per", names)
    per = [per] if isinstance(per, str) else per
    if not isinstance(per, list) or not {*per} <= {*names}:
        raise UserError(f"{path}: best.per: {show(per)}; a list of {', '.join(names) or 'axes of over'} is needed")
    best = Best(tried, by, of, tuple(per), read_labels(path, axes, "best.using", given.get("using") or {}))
    without = {best.cell(each) for each in labels} - {best.cell(each) for each in labels if best.tunes(each)}
    if without:
        raise UserError(f"{path}: best.using: leaves no run by which to choose for {', '.join(min(without)) or 'all'}")
    return best


@dataclass
class Choice:
    """The choice for one cell. values: each candidate's metric by run, nan if it diverged; missing: runs not done."""

    cell: dict[str, str]
    values: list[dict[str, float]] = field(default_factory=list)
    missing: int = 0
    chosen: dict[str, str] | None = None

    def __str__(self) -> str:
        """`method fedavg: train.lr 0.1`"""
        cell = _words(self.cell) or "all"
        if self.chosen is None:
            why = f"{count(self.missing, 'run')} not done" if self.missing else "every candidate has diverged"
            return f"{cell}: not chosen, {why}"
        return f"{cell}: {_words(self.chosen)}"


def _words(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {label}" for name, label in labels.items())


def choose(best: Best, runs: Iterable[tuple[dict[str, str], Settings]]) -> dict[tuple[str, ...], Choice]:
    """Choose a candidate for each cell whose runs are done.

    runs: those by which candidates are chosen. Raises UserError where a run lacks the metric.
    """
    choices: dict[tuple[str, ...], Choice] = {}
    lowest, falling = False, set[str]()
    for labels, settings in runs:
        state = progress.read_state(settings)
        cell = choices.setdefault(best.cell(labels), Choice({name: labels[name] for name in best.per}))
        cell.values = cell.values or [{} for _ in best.candidates]
        if state.what != progress.DONE and not state.diverged:
            cell.missing += 1
            continue
        at = best.candidates.index({axis.name: labels[axis.name] for axis in best.axes})
        cell.values[at][settings.name] = _value(best, state, settings)
        goal = settings.evaluate.best.goal if settings.evaluate.best.metric == best.by else "auto"
        falling.update(state.summary.get("falling", ()))
        lowest = lower_is_better(best.by, falling) if goal == "auto" else goal == "lowest"
    for cell in choices.values():
        if not cell.missing:
            cell.chosen = _first_best(best, cell, -1 if lowest else 1)
    return choices


def _value(best: Best, state: progress.State, settings: Settings) -> float:
    if state.diverged or state.summary.get("diverged") is not None:
        return math.nan
    if best.figure not in state.summary.get("last", {}):
        raise UserError(f"best.by: {best.by}: the run {settings.name} has no {best.figure}; set data.validation: 0.1")
    return state.figure(best.of, best.figure)


def _first_best(best: Best, cell: Choice, sign: int) -> dict[str, str] | None:
    means = [fmean(values.values()) for values in cell.values]
    finite = [at for at, mean in enumerate(means) if math.isfinite(mean)]
    return best.candidates[max(finite, key=lambda at: (sign * means[at], -at))] if finite else None


def facts(best: Best, choices: Mapping[tuple[str, ...], Choice]) -> dict[str, Any]:
    """Return the content of best.json: what was chosen for each cell, and by which figures."""
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
