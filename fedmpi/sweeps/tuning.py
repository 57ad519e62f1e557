"""Tune settings within a sweep: before the final runs, choose the best candidate for each method on validation rows.

The section `tune` of a sweep file contains the candidates (`grid`), the metric by which they are compared (`by`) and
its section of summary.json (`of`). `per` lists axes; a candidate is chosen for each combination of their labels.
`using` selects the runs for the comparison. The candidate with the best mean over these runs is chosen (the first, if
several are equal). A candidate is excluded if any of its runs diverged or ended without a finite value of the metric.
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
from fedmpi.common.text import is_lower_better, pluralize
from fedmpi.common.type_descriptions import shorten_value
from fedmpi.config import Settings, loading
from fedmpi.config.field_types import Section
from fedmpi.config.yaml_source import ConfigLayer
from fedmpi.sweeps import progress
from fedmpi.sweeps.axes import SEED, Axis, read_axis, read_selected_labels

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
    """The candidates of a sweep with `tune`, and the metric and the runs by which the best candidates are chosen."""

    axes: tuple[Axis, ...]
    metric: str
    summary_part: str
    per: tuple[str, ...]
    using: dict[str, list[str]]

    @property
    def metric_name(self) -> str:
        """The name of the metric in summary.json."""
        return f"validation_{self.metric}"

    @property
    def candidates(self) -> list[dict[str, str]]:
        """All candidates, each as a mapping of axes to labels."""
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, chosen, strict=True)) for chosen in product(*(axis.choices for axis in self.axes))]

    @property
    def evaluation_layer(self) -> ConfigLayer:
        """The settings with which runs evaluate the metric on validation rows; all other settings override them."""
        return loading.nest_value("evaluate.best.metric", self.metric, "tune.by")

    def is_tuning_run(self, labels: Mapping[str, str]) -> bool:
        """Return whether the run with these labels is used to compare candidates."""
        return all(labels[name] in chosen for name, chosen in self.using.items())

    def get_cell_key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Return the labels of a run on the axes listed in `per`.

        All runs for which these labels are equal get the same chosen candidate.
        """
        return tuple(labels[name] for name in self.per)


def read_tuning(
    path: Path, document: ConfigLayer, axes: Sequence[Axis], labels: Sequence[Mapping[str, str]], section: TuneSection
) -> Tuning:
    """Check the section `tune` of a sweep file and convert it to a `Tuning`.

    Args:
        path: the sweep file, for messages.
        document: the content of the sweep file.
        labels: the labels of each run of the sweep.

    Raises:
        UserError: if the metric, an axis or a label is invalid, or there is no run on which to compare candidates.
    """
    if section.by.startswith(("validation_", "personal_", "test_")):
        raise UserError(
            f"{path}: tune.by: {shorten_value(section.by)} is not allowed; must be loss or a metric of the task, "
            "without a prefix, such as accuracy"
        )
    axis_names = [axis.name for axis in axes if axis.name != SEED]
    if misplaced := {*section.grid} & {*axis_names, SEED}:
        raise UserError(
            f"{path}: tune.grid.{min(misplaced)} is not allowed, because {min(misplaced)} is an axis of grid, or "
            f"the seed; remove tune.grid.{min(misplaced)}"
        )
    candidate_axes = tuple(
        read_axis(path, document, name, values, "tune.grid") for name, values in section.grid.items()
    )
    per = [section.per] if isinstance(section.per, str) else axis_names if section.per is None else section.per
    if not {*per} <= {*axis_names}:
        allowed = (
            f"a list of axes of grid: {', '.join(axis_names)}" if axis_names else "[], as grid has no axis except seed"
        )
        raise UserError(f"{path}: tune.per: {shorten_value(per)} is not allowed; must be {allowed}")
    using = read_selected_labels(path, axes, "tune.using", section.using)
    plan = Tuning(candidate_axes, section.by, section.of, tuple(per), using)
    uncovered = {plan.get_cell_key(run) for run in labels} - {
        plan.get_cell_key(run) for run in labels if plan.is_tuning_run(run)
    }
    if uncovered:
        cell = ", ".join(min(uncovered)) or "any run"
        raise UserError(f"{path}: tune.using includes no run to compare candidates for {cell}; include more labels")
    return plan


@dataclass
class TuningChoice:
    """The choice of a candidate for one cell: the runs that have the same labels on the axes listed in `tune.per`."""

    cell: dict[str, str]  # axis -> label, for the axes listed in `tune.per`
    candidate_metrics: list[dict[str, float]]  # for each candidate: run -> metric; nan if the run diverged
    num_missing: int = 0  # number of runs that are not finished
    chosen: dict[str, str] | None = None  # axis -> label of the chosen candidate; None if none is chosen

    def __str__(self) -> str:
        """Return the choice as text, such as `method fedavg: train.lr 0.1`."""
        pairs = ((each or {}).items() for each in (self.cell, self.chosen))
        cell, chosen = (", ".join(f"{name} {label}" for name, label in each) for each in pairs)
        reason = f"{pluralize(self.num_missing, 'run')} missing" if self.num_missing else "every candidate has diverged"
        return f"{cell or 'all runs'}: {chosen or f'no candidate chosen, because {reason}'}"


def choose_candidates(
    plan: Tuning, runs: Iterable[tuple[dict[str, str], Settings]]
) -> dict[tuple[str, ...], TuningChoice]:
    """Choose the best candidate for each cell, a group of runs that have the same labels on the axes listed in `per`.

    Args:
        plan: the candidates and the metric.
        runs: labels and settings of the runs on which candidates are compared.

    Returns:
        The choice for each cell. No candidate is chosen for a cell if some of its runs are missing, or if all its
        candidates diverged.

    Raises:
        UserError: if a run has no value of the metric.
    """
    choices: dict[tuple[str, ...], TuningChoice] = {}
    candidates, minimize, falling_metrics = plan.candidates, False, set[str]()
    for labels, settings in runs:
        state, cell = progress.read_state(settings), {name: labels[name] for name in plan.per}
        choice = choices.setdefault(plan.get_cell_key(labels), TuningChoice(cell, [{} for _ in candidates]))
        if state.status != progress.DONE and not state.diverged:
            choice.num_missing += 1
            continue
        position = candidates.index({axis.name: labels[axis.name] for axis in plan.axes})
        choice.candidate_metrics[position][settings.name] = _read_candidate_metric(plan, state, settings)
        goal = settings.evaluate.best.goal if settings.evaluate.best.metric == plan.metric else "auto"
        falling_metrics.update(state.summary.get("lower_is_better", ()))
        minimize = is_lower_better(plan.metric, falling_metrics) if goal == "auto" else goal == "lowest"
    for choice in choices.values():
        if not choice.num_missing:
            means = [fmean(values.values()) for values in choice.candidate_metrics]
            finite = [position for position, mean in enumerate(means) if math.isfinite(mean)]
            select = min if minimize else max
            choice.chosen = candidates[select(finite, key=means.__getitem__)] if finite else None
    return choices


def _read_candidate_metric(plan: Tuning, state: progress.RunState, settings: Settings) -> float:
    """Return the metric of a tuning run; nan if the run diverged."""
    if state.diverged or state.summary.get("diverged") is not None:
        return math.nan
    if plan.metric_name not in state.summary.get("last", {}):
        raise UserError(
            f"tune.by: {plan.metric}: the run {settings.name} has not measured {plan.metric_name}; set data.validation "
            "to the fraction of training rows to hold out for it, such as 0.1"
        )
    return state.get_metric(plan.summary_part, plan.metric_name)


def choices_to_dict(plan: Tuning, choices: Mapping[tuple[str, ...], TuningChoice]) -> dict[str, Any]:
    """Return the content of tuning.json: for each cell the chosen candidate, and the metrics of all candidates."""
    cells = []
    for choice in choices.values():
        candidates = [
            {"labels": labels, "mean": fmean(values.values()) if values else None, "runs": values}
            for labels, values in zip(plan.candidates, choice.candidate_metrics, strict=True)
        ]
        cells.append({"cell": choice.cell, "chosen": choice.chosen, "candidates": candidates})
    return {"by": plan.metric_name, "of": plan.summary_part, "cells": cells}
