"""Load a sweep file and expand it to the settings of its runs.

A sweep file is a config with a key `grid`:

    grid:                                                      # the axes; each of them lists
      method: [methods/fedavg.yaml, methods/fedprox.yaml]      # config files, as under `base`; or
      data.partition.alpha: [0.1, 0.5]                         # values of one key; or
      set: {MNIST: {data: {source: mnist}}, digits: {...}}     # labels with any settings
      seed: [0, 1, 2]
    include: {set: [MNIST]}                                    # train only the runs with these labels
    exclude: [{set: digits, method: fedprox}]                  # do not train the runs with these labels
    tune: {grid: {train.lr: [0.01, 0.1]}, by: accuracy, per: [method], using: {seed: 0}}    # see tuning.py
    published:                                                 # published values, for comparison
      source: Table 1 of the paper
      metric: accuracy
      values: {fedavg: {"0.1": 42.3, "0.5": [73.9, 0.4]}}

`values` is nested by the labels of all axes except `seed`, in the order of the axes. A value is a mean, or a list of
mean and standard deviation. If `metric` is a list, each cell is a list with one such value per metric, or null if that
value was not published.

There is one run for each combination of labels. The settings of the run's labels are merged over those of the file, in
the order of the axes. If the sweep file has no `name`, the sweep is named after the file; it does not inherit the name
of a run in `base`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_key
from fedmpi.config import loading
from fedmpi.config.field_types import Section
from fedmpi.config.loading import SWEEP_KEYS
from fedmpi.config.renamed import RENAMED_KEYS
from fedmpi.config.schema import Settings
from fedmpi.config.yaml_source import ConfigLayer
from fedmpi.runtime.inspection.run_files import SWEEP_FILE
from fedmpi.sweeps import progress, tuning
from fedmpi.sweeps.axes import (
    Axis,
    PublishedResults,
    PublishedSection,
    read_axis,
    read_published_results,
    read_selected_labels,
)
from fedmpi.sweeps.tuning import TuneSection, Tuning, TuningChoice

Labels = dict[str, str]  # axis -> label


class SweepKeys(Section):
    """The config keys that are allowed only in sweep files."""

    grid: dict[str, Any] = {}
    include: dict[str, Any] | None = None
    exclude: list[dict[str, Any]] | None = None
    published: PublishedSection | None = None
    tune: TuneSection | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep that was loaded from a file; its methods return the labels and the settings of its runs.

    A sweep with `tune` is trained in two stages. In the first stage, the tuning runs compare candidates, which are
    combinations of settings; the labels of a tuning run include those of its candidate. In the second stage, the final
    runs use the chosen candidates. A sweep without `tune` has only one stage, which contains all its runs.
    """

    path: Path
    axes: tuple[Axis, ...]
    labels: tuple[Labels, ...]  # the labels of each run, without those of a candidate
    published: tuple[PublishedResults, ...]  # one for each metric
    base: ConfigLayer = field(repr=False)  # the settings that all runs share
    overrides: tuple[str, ...] = ()  # the overrides that change settings of runs
    tuning: Tuning | None = None
    all_overrides: tuple[str, ...] = ()  # `overrides`, and those that change keys of the sweep, such as `include`

    @property
    def command(self) -> str:
        """The command line that trains the sweep, with secrets replaced by `<redacted>`."""
        return shlex.join(["fedmpi", "sweep", str(self.path), *map(loading.redact_override, self.all_overrides)])

    def run_name(self, labels: Labels) -> str:
        """Return the name of the run with these labels; it has one part per axis."""
        return "_".join(axis.format_slug(labels[axis.name]) for axis in self._list_axes(labels))

    def _list_axes(self, labels: Labels) -> list[Axis]:
        """Return the axes, including those of the section `tune`, that have a label in `labels`."""
        all_axes = (*self.axes, *(self.tuning.axes if self.tuning else ()))
        return [axis for axis in all_axes if axis.name in labels]

    def run_settings(self, labels: Labels) -> Settings:
        """Return the settings of the run with these labels; its run directory is output/SWEEP/RUN.

        Raises:
            UserError: if the settings are invalid; the message names the labels of the run.
        """
        layers = [self.tuning.evaluation_layer] if self.tuning else []
        layers += [self.base, *(axis.choices[labels[axis.name]] for axis in self._list_axes(labels))]
        layers.append(loading.parse_overrides(self.overrides))
        try:
            settings = loading.merge_settings(layers, self.path)
        except UserError as error:
            run = ", ".join(f"{name}: {label}" for name, label in labels.items())
            raise UserError(f"{error}\n  in the run {run}") from error
        return settings.model_copy(update={"output": settings.output / settings.name, "name": self.run_name(labels)})

    def first_stage_labels(self) -> list[Labels]:
        """Return the labels of all runs of the first stage."""
        if self.tuning is None:
            return list(self.labels)
        tuning_runs = [each for each in self.labels if self.tuning.is_tuning_run(each)]
        return [labels | candidate for labels in tuning_runs for candidate in self.tuning.candidates]

    def covering_labels(self) -> Iterator[Labels]:
        """Yield the labels of a few runs of the first stage that together contain every label of every axis."""
        covered: set[tuple[str, str]] = set()
        for labels in self.first_stage_labels():
            if not covered.issuperset(labels.items()):
                covered |= labels.items()
                yield labels

    def first_stage_runs(self) -> Iterator[tuple[Labels, Settings]]:
        """Yield the labels and the settings of each run of the first stage.

        Raises:
            UserError: if settings are invalid, or two runs have the same settings.
        """
        labels_by_settings: dict[str, Labels] = {}
        for labels in self.first_stage_labels():
            settings = self.run_settings(labels)
            first = labels_by_settings.setdefault(settings.model_dump_json(exclude={"name", "output"}), labels)
            if first is not labels:
                raise UserError(
                    f"{self.path}: grid: the runs {first} and {labels} have the same settings; remove one of the labels"
                )
            yield labels, settings

    def tuning_choices(self) -> dict[tuple[str, ...], TuningChoice]:
        """Choose a candidate for each cell; return {the cell's labels: its choice}.

        A cell is a group of runs that have the same labels on the axes listed in tune.per. A cell with missing runs
        gets no candidate. Without a `tune` section the result is {}.
        """
        return tuning.choose_candidates(self.tuning, self.first_stage_runs()) if self.tuning else {}

    def final_runs(self) -> list[tuple[Labels, Settings | None]]:
        """Return the labels and the settings of the runs whose results are reported.

        The settings are None if no candidate has been chosen for the run yet.
        """
        if self.tuning is None:
            return list(self.first_stage_runs())
        choices = self.tuning_choices()
        candidates = [choices[self.tuning.get_cell_key(labels)].chosen for labels in self.labels]
        return [
            (labels, None if candidate is None else self.run_settings(labels | candidate))
            for labels, candidate in zip(self.labels, candidates, strict=True)
        ]

    def known_runs(self) -> list[Settings]:
        """Return the settings of all first-stage runs, and of the final runs whose candidates have been chosen."""
        runs = [settings for _, settings in (*self.first_stage_runs(), *(self.final_runs() if self.tuning else ()))]
        return list({settings.name: settings for settings in runs if settings is not None}.values())

    def needs_no_training(self, settings: Settings) -> bool:
        """Return whether a run needs no more training: it is done, or it is a candidate of `tune` that diverged."""
        state = progress.read_state(settings)
        return state.status == progress.DONE or (self.tuning is not None and state.diverged)

    def write_run_list(self, directory: Path, run_names: Iterable[str]) -> None:
        """Write the list of runs, which `fedmpi status` and `fedmpi report` read, to sweep.json in `directory`."""
        labels_by_name, runs = {self.run_name(labels): labels for labels in self.first_stage_labels()}, list(run_names)
        content = {
            "file": str(self.path.resolve()),
            "overrides": [loading.redact_override(text) for text in self.all_overrides],
            "runs": runs,
            "labels": {name: labels_by_name[name] for name in runs if name in labels_by_name},
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            from fedmpi.runtime.record import (
                atomic_files,  # imports torch, which `fedmpi status` of a sweep does not need
            )

            atomic_files.write_atomically(directory / SWEEP_FILE, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(f"output: cannot write to {directory}: {error.strerror}; set another output") from error


def is_sweep_file(path: str | Path) -> bool:
    """Return whether a config file or one of its bases contains keys that only sweep files have."""
    return any(key in loading.read_with_bases(Path(path)).data for key in SWEEP_KEYS)


def _is_sweep_key(override: str) -> bool:
    """Return whether an override, such as include={seed: 0}, sets a key that only sweep files have.

    Former names of these keys are recognised, too.
    """
    key = re.split(r"[.=]", override)[0]
    return RENAMED_KEYS.get(key, key) in SWEEP_KEYS


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Load a sweep from a file.

    Args:
        path: the sweep file.
        overrides: `key=value`, as on the command line; a key may be a setting of all runs, or a key of sweep files.

    Raises:
        UserError: if there is no `grid`, an axis is empty, an axis or a label is unknown, an override changes a key
            that an axis sets, or two runs have the same name.
    """
    path = Path(path)
    sweep_overrides = [text for text in overrides if _is_sweep_key(text)]
    settings_overrides = [text for text in overrides if text not in sweep_overrides]
    config = loading.merge_layers(loading.read_with_bases(path), loading.parse_overrides(sweep_overrides))
    sweep_tree = {key: config.data.pop(key) for key in SWEEP_KEYS if key in config.data}
    loading.raise_if_any_problems(config.old_names or config.problems)
    unknown = next((key for key in config.data if key not in Settings.model_fields), None)
    if "grid" not in sweep_tree and unknown is not None:
        where = config.origins.get(unknown, path)
        raise UserError(
            f"{where}: {unknown}: unknown key; {suggest_key(unknown, SWEEP_KEYS)}; axes of a sweep belong under `grid`"
        )
    try:
        section = SweepKeys.model_validate(sweep_tree, strict=True)
    except ValidationError as error:
        raise UserError(
            loading.validation_messages(error, replace(config, data=sweep_tree), str(path), SweepKeys)[0]
        ) from error
    if not section.grid:
        raise UserError(
            f"{path}: grid: no axes are given; give at least one, such as grid: {{seed: [0, 1, 2]}}, or train a single "
            "run with `fedmpi run`"
        )
    axes = tuple(read_axis(path, config, name, values) for name, values in section.grid.items())
    for text, axis in product(settings_overrides, axes):
        if axis.sets_key(text.partition("=")[0]):
            remedy = f"to choose among its values, use include={{{axis.name}: ...}}; for other values, change grid"
            raise UserError(
                f"command line: {loading.redact_override(text)} is not allowed, because axis {axis.name} of the sweep "
                f"sets this key; {remedy}"
            )
    labels = tuple(_expand_labels(path, axes, section.include or {}, section.exclude or []))
    tuning_plan = tuning.read_tuning(path, config, axes, labels, section.tune) if section.tune else None
    published = read_published_results(path, axes, section.published) if section.published else ()
    sweep = Sweep(path, axes, labels, published, config, tuple(settings_overrides), tuning_plan, tuple(overrides))
    names: dict[str, Labels] = {}
    for labels_of_run in sweep.first_stage_labels():
        name = sweep.run_name(labels_of_run)
        if (first := names.setdefault(name, labels_of_run)) is not labels_of_run:
            raise UserError(
                f"{path}: grid: the runs {first} and {labels_of_run} would have the same name, {name}; rename a label"
            )
    return sweep


def _expand_labels(
    path: Path, axes: Sequence[Axis], include: dict[str, Any], exclude: list[dict[str, Any]]
) -> list[Labels]:
    """Return the labels of each run: all combinations of labels that match `include` but not `exclude`."""
    included_labels = read_selected_labels(path, axes, "include", include)
    excluded = [read_selected_labels(path, axes, f"exclude[{i}]", entry) for i, entry in enumerate(exclude)]
    included = [
        [label for label in axis.choices if label in included_labels.get(axis.name, axis.choices)] for axis in axes
    ]
    names = [axis.name for axis in axes]
    combinations = [dict(zip(names, labels, strict=True)) for labels in product(*included)]
    labels = [
        run
        for run in combinations
        if not any(all(run[name] in few for name, few in exclusion.items()) for exclusion in excluded)
    ]
    if not labels:
        raise UserError(f"{path}: include and exclude leave no run; include more labels, or exclude fewer")
    return labels
