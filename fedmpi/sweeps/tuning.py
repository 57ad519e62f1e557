"""Tune settings within a sweep: for each method, choose the best candidate on validation rows before the final runs.

The section `tune` has the candidates (`grid`), the metric (`by`, `of`), the axes for whose labels candidates are chosen
separately (`per`), and the runs on which candidates are compared (`using`). The candidate with the best mean over these
runs is chosen, the first one if several are equal. A candidate is excluded if one of its runs diverged, or ended
without a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import is_lower_better, pluralize, shorten_repr
from fedmpi.config import Settings, loading
from fedmpi.config.field_types import Section
from fedmpi.config.yaml_source import ConfigLayer
from fedmpi.sweeps import progress
from fedmpi.sweeps.axes import SEED, Axis, read_axis, read_labels

CHOICES_FILE = "tuning.json"


class TuneSection(Section):
    """The section `tune` of a sweep file."""

    grid: Annotated[dict[str, Any], Field(min_length=1)]  # axes of candidates; each combination is a candidate
    by: str  # metric on the rows that data.validation holds out; accuracy: validation_accuracy of each run
    of: Literal["last", "mean_last_10", "best"] = "last"
    per: list[str] | str | None = None  # null: all axes except `seed`
    using: dict[str, Any] = {}  # axis -> labels; default: all


@dataclass(frozen=True)
class Tuning:
    """The candidates of a sweep, and the rule by which one of them is chosen."""

    axes: tuple[Axis, ...]
    metric: str
    summary_part: str
    per: tuple[str, ...]
    using: dict[str, list[str]]

    @property
    def metric_name(self) -> str:
        return f"validation_{self.metric}"

    @property
    def candidates(self) -> list[dict[str, str]]:
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, chosen, strict=True)) for chosen in product(*(axis.choices for axis in self.axes))]

    @property
    def evaluation_layer(self) -> ConfigLayer:
        """The lowest layer of each run's settings, which evaluates the metric on validation rows."""
        return loading.nest_value("evaluate.best.metric", self.metric, "tune.by")

    def is_tuning_run(self, labels: Mapping[str, str]) -> bool:
        """Return whether the run with these labels is used to compare candidates."""
        return all(labels[name] in chosen for name, chosen in self.using.items())

    def cell_key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Return the labels on the axes `per`; runs with equal ones share the chosen candidate."""
        return tuple(labels[name] for name in self.per)


def read_tuning(
    path: Path, document: ConfigLayer, axes: Sequence[Axis], labels: Sequence[Mapping[str, str]], section: TuneSection
) -> Tuning:
    """Check the section `tune` of a sweep file and convert it to a `Best`.

    Args:
        labels: the labels of the sweep's runs.

    Raises:
        UserError: if the metric, an axis or a label is invalid, or there is no run on which to compare candidates.
    """
    if section.by.startswith(("validation_", "personal_", "test_")):
        raise UserError(
            f"{path}: tune.by: {shorten_repr(section.by)}; loss or a metric of the task is needed: by: accuracy"
        )
    names = [each.name for each in axes if each.name != SEED]
    if fixed := {*section.grid} & {*names, SEED}:
        raise UserError(f"{path}: tune.grid.{min(fixed)}: is an axis of grid, or the seed; candidates are other keys")
    tried = tuple(read_axis(path, document, name, values, "tune.grid") for name, values in section.grid.items())
    per = [section.per] if isinstance(section.per, str) else names if section.per is None else section.per
    if not {*per} <= {*names}:
        raise UserError(
            f"{path}: tune.per: {shorten_repr(per)}; a list of {', '.join(names) or 'axes of grid'} is needed"
        )
    using = read_labels(path, axes, "tune.using", section.using)
    best = Tuning(tried, section.by, section.of, tuple(per), using)
    without = {best.cell_key(each) for each in labels} - {
        best.cell_key(each) for each in labels if best.is_tuning_run(each)
    }
    if without:
        raise UserError(f"{path}: tune.using: leaves no run by which to choose for {', '.join(min(without)) or 'all'}")
    return best


@dataclass
class Choice:
    """The choice of a candidate for one cell, that is for the runs that have the same labels on the axes `per`."""

    cell: dict[str, str]  # axis -> label
    candidate_metrics: list[dict[str, float]]  # for each candidate {run: metric}, nan if the run diverged
    num_missing: int = 0  # number of runs that are not done
    chosen: dict[str, str] | None = None  # labels of the chosen candidate

    def __str__(self) -> str:
        """Return the choice as text: `method fedavg: train.lr 0.1`."""
        pairs = ((each or {}).items() for each in (self.cell, self.chosen))
        cell, chosen = (", ".join(f"{name} {label}" for name, label in each) for each in pairs)
        why = f"{pluralize(self.num_missing, 'run')} not done" if self.num_missing else "every candidate has diverged"
        return f"{cell or 'all'}: {chosen or f'not chosen, {why}'}"


def choose_candidates(best: Tuning, runs: Iterable[tuple[dict[str, str], Settings]]) -> dict[tuple[str, ...], Choice]:
    """Choose a candidate for each cell whose runs are done.

    Args:
        runs: labels and settings of the runs on which candidates are compared.

    Returns:
        The choice of each cell; nothing is chosen if runs are missing or all candidates diverged.

    Raises:
        UserError: if a run lacks the metric.
    """
    choices: dict[tuple[str, ...], Choice] = {}
    candidates, lowest, lower_is_better = best.candidates, False, set[str]()
    for labels, settings in runs:
        state, cell = progress.read_state(settings), {name: labels[name] for name in best.per}
        choice = choices.setdefault(best.cell_key(labels), Choice(cell, [{} for _ in candidates]))
        if state.status != progress.DONE and not state.diverged:
            choice.num_missing += 1
            continue
        at = candidates.index({axis.name: labels[axis.name] for axis in best.axes})
        choice.candidate_metrics[at][settings.name] = _read_candidate_metric(best, state, settings)
        goal = settings.evaluate.best.goal if settings.evaluate.best.metric == best.metric else "auto"
        lower_is_better.update(state.summary.get("lower_is_better", ()))
        lowest = is_lower_better(best.metric, lower_is_better) if goal == "auto" else goal == "lowest"
    for choice in choices.values():
        if not choice.num_missing:
            means = [fmean(values.values()) for values in choice.candidate_metrics]
            finite = [at for at, mean in enumerate(means) if math.isfinite(mean)]
            take = min if lowest else max
            choice.chosen = candidates[take(finite, key=means.__getitem__)] if finite else None
    return choices


def _read_candidate_metric(best: Tuning, state: progress.RunState, settings: Settings) -> float:
    if state.diverged or state.summary.get("diverged") is not None:
        return math.nan
    if best.metric_name not in state.summary.get("last", {}):
        raise UserError(
            f"tune.by: {best.metric}: the run {settings.name} has no {best.metric_name}; set data.validation: 0.1"
        )
    return state.get_metric(best.summary_part, best.metric_name)


def choices_to_dict(best: Tuning, choices: Mapping[tuple[str, ...], Choice]) -> dict[str, Any]:
    """Return the content of tuning.json: the chosen candidate of each cell, and the metrics of all candidates."""
    cells = []
    for each in choices.values():
        candidates = [
            {"labels": labels, "mean": fmean(values.values()) if values else None, "runs": values}
            for labels, values in zip(best.candidates, each.candidate_metrics, strict=True)
        ]
        cells.append({"cell": each.cell, "chosen": each.chosen, "candidates": candidates})
    return {"by": best.metric_name, "of": best.summary_part, "cells": cells}
