"""Compute predictions for new rows with a model of a run: `fedmpi.load(...).predict`, and `fedmpi predict`.

New rows are prepared in the same way as the training rows. `fedmpi predict` writes a CSV file, or an .npz file if a
prediction consists of several numbers per row.
"""

from __future__ import annotations

import csv
import io
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi import tasks
from fedmpi.comm.launchers import detect
from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import call_module, describe_samples, get_sample_shape
from fedmpi.common.target_scale import TargetScale
from fedmpi.common.text import format_metric, pluralize
from fedmpi.config.loading import parse_overrides
from fedmpi.config.schema import Settings
from fedmpi.data.batches import Shard, batches
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.preprocessing import NewRows, PredictionRequest, apply_reading_options
from fedmpi.data.sources.source_utils import set_ignored_target
from fedmpi.data.transforms.base import Transform, to_memory_format
from fedmpi.data.transforms.pipeline import ImagePipeline
from fedmpi.runtime import code_trust
from fedmpi.runtime.device import choose_device, configure_numerics
from fedmpi.runtime.finished_runs.models import RunModel
from fedmpi.runtime.record import atomic_files
from fedmpi.runtime.record.data_files import PREPROCESSING, Preprocessing, find_own_preprocessing, read_preprocessing
from fedmpi.runtime.record.saved_model import parse_input_shape
from fedmpi.tasks import validation

PREDICTIONS_FOLDER = "predictions"  # in the run directory


def predict_file(
    run_model: RunModel,
    file: Path,
    print_line: Callable[[str], None],
    *,
    out: Path | None = None,
    site: str | None = None,
    ids: Sequence[str] = (),
) -> Path:
    """Compute predictions for the rows of a file, write them to another file, and return its path.

    Args:
        out: the file to write; None: a file in the folder predictions/ of the run directory.
        site: the site of the rows, if rows are prepared with statistics of their site.
        ids: names of columns that are copied to the output.

    Raises:
        UserError: the rows do not have the format of the training rows, the model is missing, or a file cannot be
            written.
    """
    settings = run_model.load_settings("compute.compile=false")
    with code_trust.forbid_external_code(run_model.trusted):
        configure_numerics(settings)
        module = run_model.load(settings)
        module = module if run_model.client is not None else module.to(choose_device(settings, detect({})))
        predictions = Predictor(module, run_model, settings)(file, site=site, ids=ids)
    columns = {column: np.asarray(values) for column, values in predictions.items()}
    suffix = ".npz" if any(values.ndim > 1 for values in columns.values()) else ".csv"
    path = out or run_model.run_dir / PREDICTIONS_FOLDER / f"{file.stem}{suffix}"
    if path.suffix.lower() != suffix:
        raise UserError(f"--to: {path} is not allowed for these predictions; must end in {suffix}")
    write_output_file(path, _format_npz(columns) if suffix == ".npz" else _format_csv(columns))
    shown = "; ".join(f"{metric} {format_metric(metric, value)}" for metric, value in predictions.metrics.items())
    rows = pluralize(len(next(iter(columns.values()))), "row")
    print_line(f"{path}: {rows}{f'; metrics from the targets in the file: {shown}' if shown else ''}")
    if predictions.why_no_metrics:
        print_line(f"{'metrics' if predictions.metrics else 'no metric'}: {predictions.why_no_metrics}")
    return path


def write_output_file(path: Path, content: bytes) -> None:
    """Write an output file of a command, and create its folder if necessary. Raises UserError if this fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another file") from error


def _format_csv(columns: Mapping[str, np.ndarray]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):  # integers get no decimal point, nan becomes an empty cell
        cells = [int(v) if isinstance(v, float) and v.is_integer() else v for v in row]
        writer.writerow(["" if v != v else v for v in cells])
    return text.getvalue().encode()


def _format_npz(columns: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of an .npz archive of the columns. np.savez is not used: it accepts no array named "file"."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array.astype(str) if array.dtype == object else array)
    return buffer.getvalue()


# ---- the predictor ----
class Predictions(dict[str, Any]):
    """A dict of columns with one value per row: first columns copied from the rows, then the model's predictions.

    Attributes:
        metrics: the task's metrics, if the rows have targets.
        why_no_metrics: why there are no metrics although rows have targets, or why the metrics exclude some rows.
    """

    metrics: Mapping[str, float] = {}
    why_no_metrics: str = ""


@dataclass(frozen=True)
class Predictor:
    """The function `predict(rows, site=None, ids=())` of a loaded model, which returns `Predictions`.

    Arguments of a call:
        rows: a file, as for `fedmpi predict`. Tables can also be given as a DataFrame or a mapping of columns, and the
            contents of an npz file as an array (n, ...) of n samples. Data of any kind can be given as inputs that are
            already prepared for the model.
        site: the site of the rows, if each site prepares its rows with statistics of its own training rows.
        ids: names of columns that are copied to the output.
    """

    module: nn.Module
    run_model: RunModel
    settings: Settings

    def __call__(self, rows: Any, *, site: str | None = None, ids: Sequence[str] = ()) -> Predictions:
        preprocessing, site = self._find_preprocessing(site)
        preparation = preprocessing.preparation
        given = parse_overrides(self.run_model.overrides).data.get("data")
        with set_ignored_target(self.settings.task.options.get("ignore")):
            options = given if isinstance(given, dict) else {}
            reader = apply_reading_options(preparation, options, ignore_others=self.run_model.client is not None)
            new_rows = reader.read_requested_rows(
                PredictionRequest(rows, site if preparation.site_names else None, tuple(ids))
            )
        others = [name for name in new_rows.sites if name not in (site, "")] if site is not None else []
        if others:
            message = f"{len(others)} of {pluralize(len(new_rows.sites), 'row')} name another site"
            message += f" (first: {others[0]}), but all are prepared as rows of site {site}"
            warnings.warn(message, stacklevel=2)
        new_rows = replace(new_rows, x=_apply_operations(new_rows.x, preprocessing.augmentations))
        shape, trained = get_sample_shape(new_rows.x), parse_input_shape(self.run_model.metadata)[0]
        if shape != trained:
            raise UserError(f"the rows have samples of shape {shape}, but the model was trained on shape {trained}")
        scales = preprocessing.find_target_scales(new_rows.sites if site is None else (site,), len(new_rows.x))
        return self._predict_rows(new_rows, preparation.output_names, scales)

    def _find_preprocessing(self, site: str | None) -> tuple[Preprocessing, str | None]:
        """Return the preprocessing of rows, and the site whose statistics it uses (None: statistics of all sites)."""
        silos, client = self.settings.data.silos, self.run_model.client
        if silos is not None:
            site = site if site is not None or client is None else find_client_site(silos, client)
            return read_preprocessing(find_own_preprocessing(self.run_model.run_dir, silos, site)), None
        preprocessing = read_preprocessing(self.run_model.run_dir / PREPROCESSING)
        if not (preprocessing.preparation.site_names or preprocessing.target_sites):
            if site is not None:
                raise UserError(
                    f"site: {site} has no effect, because this run prepares the rows of all sites alike; "
                    "remove --site (in Python the argument site)"
                )
        elif site is None and client is not None and preprocessing.client_sites:
            site = find_client_site(preprocessing.client_sites, client)
        return preprocessing, site

    def _predict_rows(self, rows: NewRows, names: Sequence[str], scales: Sequence[TargetScale] | None) -> Predictions:
        """Compute the predictions for all rows and, if the rows have targets, the task's metrics."""
        construct = registry.make_component(tasks.KIND, self.settings.task, self.settings.key_origins("task"))
        with seeds.temporary_seed(self.settings.seed, "task"):
            task = construct(int(self.run_model.metadata["classes"]))
        validation.check_task(task)
        targets = torch.zeros(len(rows.x)) if rows.y is None else rows.y
        shard = Shard(rows.x, targets, torch.arange(len(targets)))
        parts, summaries = list[Mapping[str, Any]](), list[Tensor]()
        reason, start = rows.why_no_targets if rows.has_target is None else "", 0
        with torch.inference_mode():
            for x, y in batches(shard, self.settings.evaluate.batch_size, None):
                f = self._compute_outputs(x)
                if scales is not None:
                    own, start = scales[start : start + len(f)], start + len(f)
                    f = torch.cat([scale.to_original_units(row[None]) for scale, row in zip(own, f, strict=True)])
                if not parts and rows.y is not None:
                    reason = reason or task.check(y, tuple(f.shape[1:]))
                if rows.y is not None and not reason:
                    summaries.append(validation.reduce_outputs(task, f, y))
                parts.append(task.predictions(f, names))
            predictions = Predictions(
                {**rows.ids, **{name: _concatenate([part[name] for part in parts]) for name in parts[0]}}
            )
            if summaries:
                known = slice(None) if rows.has_target is None else rows.has_target
                predictions.metrics = validation.compute_metrics(task, torch.cat(summaries)[known], targets[known])
        predictions.why_no_metrics = reason or rows.why_no_targets
        return predictions

    def _compute_outputs(self, x: Any) -> Tensor:
        """Return the outputs (B, ...) for B samples on the CPU, computed in the precision of the run's evaluations."""
        module = self.module.eval()
        like = next(iter(module.parameters()), torch.empty(0))
        if isinstance(x, Tensor):
            x = to_memory_format(x, self.settings.compute.channels_last)
        is_bf16 = self.settings.compute.precision == "bf16"
        try:
            with torch.autocast(like.device.type, torch.bfloat16) if is_bf16 else nullcontext():
                f: Tensor = call_module(module, x.to(like.device)).to(like.dtype).cpu()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the model cannot process these rows ({describe_samples(x)}): {error}") from error
        if not bool(f.isfinite().all()):
            raise UserError("the model's outputs are not finite for some rows; it has probably diverged in training")
        return f


def _concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate the values of one column of predictions; `parts` contains the values of each batch."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts)).numpy()
    return [value for part in parts for value in part]


def _apply_operations(x: Any, operations: tuple[Transform, ...]) -> Any:
    """Apply to the samples `x` those image operations that are also applied to test samples (the non-random ones)."""
    if not operations:
        return x
    look = replace(x.pipeline if isinstance(x, LazyImages) else ImagePipeline(), transforms=operations)
    return LazyImages(x.stored if isinstance(x, LazyImages) else x, look)


def find_client_site(silos: Sequence[str], client: int | str) -> str:
    """Return the site name of a client, given the client's number or the site name itself."""
    return client if isinstance(client, str) and client in silos else silos[int(client)]
