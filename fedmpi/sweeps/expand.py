"""Load a sweep file, and expand it to the settings of its runs. A sweep file is a config with a key `grid`.

    grid:                                                       the axes; each has
      method: [methods/fedavg.yaml, methods/fedprox.yaml]      config files, as under `base`; or
      data.partition.alpha: [0.1, 0.5]                          values of a key; or
      set: {MNIST: {data: {source: mnist}}, digits: {...}}      labels with any settings
      seed: [0, 1, 2]
    include: {set: [MNIST]}              axis -> labels to run; a smaller sweep can have a larger one as its base
    exclude: [{set: digits, method: fedprox}]
    tune: {grid: {train.lr: [0.01, 0.1]}, by: accuracy, per: [method], using: {seed: 0}}    see tuning.py
    published:                           published values, by labels of the axes except `seed`, in their order
      source: who
      metric: accuracy
      values: {fedavg: {"0.1": 42.3, "0.5": [73.9, 0.4]}}       a mean, or mean and standard deviation; for several
                                       metrics ([accuracy, loss]) a list with one of these each, null if unknown

A run has one label of each axis; the settings of the labels are merged over the file in the order of the axes. If the
sweep file has no `name`, the sweep has the name of the file; it does not inherit the name of a run in `base`.
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
from fedmpi.config.renamed import KEYS
from fedmpi.config.schema import Settings
from fedmpi.config.yaml_source import ConfigLayer
from fedmpi.runtime.inspection.run_files import SWEEP_FILE
from fedmpi.sweeps import progress, tuning
from fedmpi.sweeps.axes import Axis, PublishedResults, PublishedSection, read_axis, read_labels, read_published_results
from fedmpi.sweeps.tuning import Choice, TuneSection, Tuning

Labels = dict[str, str]  # axis -> label


class SweepKeys(Section):
    """The keys that only sweep files have."""

    grid: dict[str, Any] = {}
    include: dict[str, Any] | None = None
    exclude: list[dict[str, Any]] | None = None
    published: PublishedSection | None = None
    tune: TuneSection | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep, which is loaded from a file, with the settings of its runs.

    With `tune`, candidates are compared on the tuning runs, whose labels include those of a candidate. The final runs
    have the candidates that were chosen.
    """

    path: Path
    axes: tuple[Axis, ...]
    labels: tuple[Labels, ...]  # of each run, without the labels of a candidate
    published: tuple[PublishedResults, ...]  # one for each metric
    base: ConfigLayer = field(repr=False)  # the settings that all runs share
    overrides: tuple[str, ...] = ()  # of settings
    tuning: Tuning | None = None
    all_overrides: tuple[str, ...] = ()  # all overrides, including those of the keys that only sweep files have

    @property
    def command(self) -> str:
        """The command line that trains the sweep. Secrets in it are replaced by a mark."""
        return shlex.join(["fedmpi", "sweep", str(self.path), *map(loading.redact_override, self.all_overrides)])

    def run_name(self, labels: Labels) -> str:
        """Return the name of the run with these labels, which consists of a part for each axis."""
        return "_".join(axis.slug(labels[axis.name]) for axis in self._axes_of(labels))

    def _axes_of(self, labels: Labels) -> list[Axis]:
        every = (*self.axes, *(self.tuning.axes if self.tuning else ()))
        return [axis for axis in every if axis.name in labels]

    def run_settings(self, labels: Labels) -> Settings:
        """Return the settings of the run with these labels. Its directory is output/SWEEP/RUN.

        Raises:
            UserError: if the settings contain mistakes; the message names the labels of the run.
        """
        layers = [self.tuning.evaluation_layer] if self.tuning else []
        layers += [self.base, *(axis.choices[labels[axis.name]] for axis in self._axes_of(labels))]
        layers.append(loading.parse_overrides(self.overrides))
        try:
            settings = loading.merge_settings(layers, self.path)
        except UserError as error:
            run = ", ".join(f"{name}: {label}" for name, label in labels.items())
            raise UserError(f"{error}\n  in the run {run}") from error
        return settings.model_copy(update={"output": settings.output / settings.name, "name": self.run_name(labels)})

    def first_stage_labels(self) -> list[Labels]:
        """Return the labels of all runs; with `tune`, those of the tuning runs, one for each candidate."""
        if self.tuning is None:
            return list(self.labels)
        on = [each for each in self.labels if self.tuning.is_tuning_run(each)]
        return [labels | candidate for labels in on for candidate in self.tuning.candidates]

    def covering_labels(self) -> Iterator[Labels]:
        """Yield the labels of a few runs that together contain every label of every axis."""
        seen: set[tuple[str, str]] = set()
        for labels in self.first_stage_labels():
            if not seen.issuperset(labels.items()):
                seen |= labels.items()
                yield labels

    def first_stage_runs(self) -> Iterator[tuple[Labels, Settings]]:
        """Yield labels and settings of all runs; with `tune`, only those of the tuning runs.

        Raises:
            UserError: if two runs have the same settings.
        """
        seen: dict[str, Labels] = {}
        for labels in self.first_stage_labels():
            settings = self.run_settings(labels)
            same = seen.setdefault(settings.model_dump_json(exclude={"name", "output"}), labels)
            if same is not labels:
                raise UserError(f"{self.path}: grid: {same} and {labels} are one run: their settings do not differ")
            yield labels, settings

    def tuning_choices(self) -> dict[tuple[str, ...], Choice]:
        """Return {cell: choice of `tune`} for all cells, including choices that still lack runs; {} without `tune`."""
        return tuning.choose_candidates(self.tuning, self.first_stage_runs()) if self.tuning else {}

    def final_runs(self) -> list[tuple[Labels, Settings | None]]:
        """Return labels and settings of the runs in the table; settings are None if no candidate is chosen yet."""
        if self.tuning is None:
            return list(self.first_stage_runs())
        chosen = self.tuning_choices()
        candidates = [chosen[self.tuning.cell_key(labels)].chosen for labels in self.labels]
        return [
            (labels, None if candidate is None else self.run_settings(labels | candidate))
            for labels, candidate in zip(self.labels, candidates, strict=True)
        ]

    def known_runs(self) -> list[Settings]:
        """Return the settings of all runs that are known so far: tuning runs, and runs with chosen candidates."""
        runs = [settings for _, settings in (*self.first_stage_runs(), *(self.final_runs() if self.tuning else ()))]
        return list({settings.name: settings for settings in runs if settings is not None}.values())

    def needs_no_training(self, settings: Settings) -> bool:
        """Return whether a run needs no more training because it is done, or is a candidate of `tune` that diverged."""
        state = progress.read_state(settings)
        return state.status == progress.DONE or (self.tuning is not None and state.diverged)

    def write_run_list(self, place: Path, names: Iterable[str]) -> None:
        """Write sweep.json, which lists the runs, to their directory, for `fedmpi status` and `fedmpi report`."""
        known, runs = {self.run_name(labels): labels for labels in self.first_stage_labels()}, list(names)
        content = {
            "file": str(self.path.resolve()),
            "overrides": [loading.redact_override(text) for text in self.all_overrides],
            "runs": runs,
            "labels": {name: known[name] for name in runs if name in known},
        }
        try:
            place.mkdir(parents=True, exist_ok=True)
            from fedmpi.runtime.record import (
                atomic_files,  # imports torch, which `fedmpi status` of a sweep does not need
            )

            atomic_files.write_atomically(place / SWEEP_FILE, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(f"output: cannot write to {place}: {error.strerror}; choose another output") from error


def is_sweep_file(path: str | Path) -> bool:
    """Return whether a config file, or one of its bases, describes a sweep."""
    return any(key in loading.read_with_bases(Path(path)).data for key in SWEEP_KEYS)


def _is_sweep_key(override: str) -> bool:
    """Return whether an override, such as include={seed: 0}, sets a key of sweep files, by its new or its old name."""
    key = re.split(r"[.=]", override)[0]
    return KEYS.get(key, key) in SWEEP_KEYS


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Load a sweep from a file.

    Args:
        overrides: as on the command line: `key=value` for settings of all runs and for the keys of the sweep.

    Raises:
        UserError: if there is no `grid`, an axis is empty, an axis or a label is unknown, an override changes a key
            that an axis sets, or two runs have the same name.
    """
    path = Path(path)
    asked = [text for text in overrides if _is_sweep_key(text)]
    rest = [text for text in overrides if text not in asked]
    document = loading.merge_layers(loading.read_with_bases(path), loading.parse_overrides(asked))
    given = {key: document.data.pop(key) for key in SWEEP_KEYS if key in document.data}
    loading.check_problems(document)
    unknown = next((key for key in document.data if key not in Settings.model_fields), None)
    if "grid" not in given and unknown is not None:
        where = document.origins.get(unknown, path)
        raise UserError(f"{where}: {unknown}: unknown key; {suggest_key(unknown, SWEEP_KEYS)}; axes stand under `grid`")
    try:
        keys = SweepKeys.model_validate(given, strict=True)
    except ValidationError as error:
        raise UserError(
            loading.validation_messages(error, replace(document, data=given), str(path), SweepKeys)[0]
        ) from error
    if not keys.grid:
        raise UserError(f"{path}: grid: there are no axes; a sweep needs some: grid: {{seed: [0, 1, 2]}}")
    axes = tuple(read_axis(path, document, name, values) for name, values in keys.grid.items())
    for text, axis in product(rest, axes):
        if axis.sets_key(text.partition("=")[0]):
            remedy = f"choose runs by include={{{axis.name}: ...}}, or others by grid={{{axis.name}: ...}}"
            raise UserError(
                f"command line: {loading.redact_override(text)}: the sweep's axis {axis.name} sets that; {remedy}"
            )
    labels = tuple(_expand_labels(path, axes, keys.include or {}, keys.exclude or []))
    chosen = tuning.read_tuning(path, document, axes, labels, keys.tune) if keys.tune else None
    reported = read_published_results(path, axes, keys.published) if keys.published else ()
    sweep = Sweep(path, axes, labels, reported, document, tuple(rest), chosen, tuple(overrides))
    names: dict[str, Labels] = {}
    for each in sweep.first_stage_labels():
        if (first := names.setdefault(sweep.run_name(each), each)) is not each:
            raise UserError(f"{path}: grid: {first} and {each} have one name, {sweep.run_name(each)}; rename one")
    return sweep


def _expand_labels(
    path: Path, axes: Sequence[Axis], include: dict[str, Any], exclude: list[dict[str, Any]]
) -> list[Labels]:
    """Return the labels of each run: all combinations of labels that `include` allows, without those in `exclude`."""
    chosen = read_labels(path, axes, "include", include)
    excluded = [read_labels(path, axes, f"exclude[{i}]", entry) for i, entry in enumerate(exclude)]
    included = [[label for label in axis.choices if label in chosen.get(axis.name, axis.choices)] for axis in axes]
    names = [axis.name for axis in axes]
    every = [dict(zip(names, labels, strict=True)) for labels in product(*included)]
    labels = [run for run in every if not any(all(run[k] in few for k, few in each.items()) for each in excluded)]
    if not labels:
        raise UserError(f"{path}: include and exclude leave no run")
    return labels
