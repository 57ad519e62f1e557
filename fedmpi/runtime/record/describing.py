"""What stands in a run directory before the first round: who runs what, where, on which samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.config import Settings
from fedmpi.data.batches import Shards
from fedmpi.data.partitions.parts import Partition
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record import plugins, preprocessing, whole
from fedmpi.runtime.record.run_dir import RunDirectory


def written(settings: Settings) -> Settings:
    """The settings as they are written down, with nothing left unsaid. `checkpoint.resume: must` and
    `checkpoint.changes: accept` are said of a start, not of the run, whose config may be run again."""
    kept = settings.checkpoint
    once = {"changes": "refuse"} | ({"resume": "never"} if kept.resume == "must" else {})
    return whole.of(settings).model_copy(update={"checkpoint": kept.model_copy(update=once)})


def describe(
    directory: RunDirectory,
    made: Experiment,
    identity: Mapping[str, str],
    environment: Mapping[str, Any],
    own: dict[Path, bytes],
) -> None:
    """own: files of the user's own code."""
    data, cut = made.data, made.settings.data.partition
    directory.write_identity(identity)
    directory.write_config(written(made.settings).resolved())
    if made.initial is not None:
        directory.write_initial(made.initial.content)
    if (prepared := preprocessing.of_run(made.settings, data)) is not None:
        directory.write_preprocessing(prepared.content())
    directory.write_environment({**environment, "plugins": directory.write_plugins(plugins.copies(own), list(own))})
    held = data.validation.rows if isinstance(data.validation, Shards) else None
    assert held is None or isinstance(held, Partition)
    scheme = cut.scheme if cut else "silos"
    directory.write_partition(scheme, made.settings.seed, data.train_sizes, data.shared_counts(), data.parts, held)
