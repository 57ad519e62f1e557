"""New rows predicted with a model of a run, prepared as the rows of the training were: `fedmpi.load(...).predict`, and
`fedmpi predict`, which writes them as a CSV or .npz file."""

from __future__ import annotations

import csv
import io
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi import tasks
from fedmpi.comm.launchers.launcher_env import detect
from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Shape, call, describe, sample_shape
from fedmpi.common.target_scale import TargetScale
from fedmpi.common.text import count, format_metric
from fedmpi.common.user_code_errors import located_error
from fedmpi.config.loading import command_line
from fedmpi.config.schema import Settings
from fedmpi.data.augment.operation import Operation, to_memory_format
from fedmpi.data.augment.pipeline import ImagePipeline
from fedmpi.data.batches import Shard, batches
from fedmpi.data.pictures import Pictures
from fedmpi.data.preparation import NewRows, Request
from fedmpi.data.reading_options import ALL, with_options
from fedmpi.data.sources.common import ignoring
from fedmpi.runtime import trust
from fedmpi.runtime.device import pick_device, set_numerics
from fedmpi.runtime.finished.models import client_model, rebuild_model
from fedmpi.runtime.record import durable
from fedmpi.runtime.record.data_files import PREPROCESSING, find_own_preprocessing, read_preprocessing
from fedmpi.runtime.record.run_dir import BEST, MODEL
from fedmpi.runtime.record.saved_model import facts_of, input_of, personal_notice
from fedmpi.tasks import contract

FOLDER = "predictions"  # of a run directory


def predict(
    run: Path,
    file: Path,
    say: Callable[[str], None],
    *,
    out: Path | None = None,
    best: bool = False,
    client: str | None = None,
    site: str | None = None,
    ids: Sequence[str] = (),
    trusted: bool = False,
    given: Sequence[str] = (),
) -> Path:
    """Write what the model of a run directory predicts of a file's rows; returns where.

    Raises UserError: a file that does not fit the rows of the training, a model that is not there, a place that cannot
    be written to.
    """
    settings = trust.run_settings(run, trusted, [*given, "compute.compile=false"])
    name = BEST if best else MODEL
    with trust.guard(trusted):
        set_numerics(settings)
        if client is not None:
            module = client_model(run, client, trusted, best, of_training(given))
        else:
            module = rebuild_model(run, settings, name).to(pick_device(settings, detect({})))
            if notice := personal_notice(facts_of(run / name)):
                warnings.warn(notice, stacklevel=2)
        predictions = predictor(module, run, settings, name, client, given)(file, site=site, ids=ids)
    return write(predictions, out or run / FOLDER / file.name, out is not None, settings, say)


def write(predictions: Predictions, to: Path, exact: bool, settings: Settings, say: Callable[[str], None]) -> Path:
    """Write predictions; what has several numbers a row, such as masks, goes into an .npz file. exact: `to` is the
    file, and not what its name is made of."""
    arrays = {name: np.asarray(values) for name, values in predictions.items()}
    suffix = ".npz" if any(array.ndim > 1 for array in arrays.values()) else ".csv"
    if exact and (to.suffix.lower() != suffix or to.is_dir()):
        raise UserError(f"--to: {to}: a file whose name ends in {suffix} is needed for these predictions")
    path = to if exact else to.with_name(f"{to.stem}{suffix}")
    content = _npz(arrays) if suffix == ".npz" else _csv(predictions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, content, settings.output_mode == "private")
    except OSError as error:
        raise UserError(f"--to: cannot write {path}: {error.strerror or error}; choose another file") from error
    many = len(next(iter(arrays.values())))
    shown = "; ".join(f"{name} {format_metric(name, value)}" for name, value in predictions.metrics.items())
    say(f"{path}: {count(many, 'row')}{f', by the targets in the file: {shown}' if shown else ''}")
    if predictions.no_metrics:
        say(f"{'metrics' if predictions.metrics else 'no metric'}: {predictions.no_metrics}")
    return path


def _csv(predictions: Predictions) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(predictions)
    writer.writerows(zip(*(_cells(values) for values in predictions.values()), strict=True))
    return text.getvalue().encode()


def _cells(values: Any) -> list[str]:
    """Numbers as short as their type allows; whole numbers, such as the lines of a file, without a point."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return ["" if np.isnan(v) else str(int(v)) if v.is_integer() and v.dtype == float else str(v) for v in values]
    return [str(value) for value in values]


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    """An archive as np.savez writes it, which takes no array with the name "file"."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array.astype(str) if array.dtype == object else array)
    return buffer.getvalue()


# ---- the predictor ----
class Predictions(dict[str, Any]):
    """Columns by name, a value a row: what says which row it is, then what the model predicts of it.

    metrics: the task's metrics, where the rows have targets; no_metrics: why there are none, if targets were there, or
    why some rows are left out of them.
    """

    metrics: Mapping[str, float] = {}
    no_metrics: str = ""


@dataclass(frozen=True)
class Predictor:
    """What `fedmpi.load(...).predict` calls: `predict(rows, site=None, ids=())` -> Predictions.

    rows: a file as `fedmpi predict` takes it, a DataFrame or a mapping of columns (tables), an array (n, ...) as the
    data source reads it (npz), or ready inputs. site: whose rows they are, where sites prepare theirs by their own
    training rows; ids: columns of the rows to copy.
    """

    run: Path
    settings: Settings
    module: nn.Module
    classes: int
    input_shape: Shape  # of one sample
    client: int | str | None = None  # whose model it is, if not the global one: its number, or its site's name
    given: Mapping[str, Any] = field(default_factory=dict)  # the caller's own settings of data

    def __call__(self, rows: Any, *, site: str | None = None, ids: Sequence[str] = ()) -> Predictions:
        silos = self.settings.data.silos
        if silos is not None:
            site = site if site is not None or self.client is None else site_of(silos, self.client)
            preprocessing = read_preprocessing(find_own_preprocessing(self.run, silos, site))
            site = None
        else:
            preprocessing = read_preprocessing(self.run / PREPROCESSING)
            has_sites = preprocessing.preparation.site_names or preprocessing.target_sites
            if site is not None and not has_sites:
                raise UserError(f"site {site!r}: this run prepares the rows of all sites alike; leave it out")
            if site is None and self.client is not None and preprocessing.client_sites:
                site = site_of(preprocessing.client_sites, self.client)
            site = site if has_sites else None
        own = site if preprocessing.preparation.site_names else None
        with ignoring(self.settings.task.options.get("ignore")):
            reader = with_options(preprocessing.preparation, self.given, others=self.client is not None)
            new_rows = reader.read(Request(rows, own, tuple(ids)))
        if site is not None:
            _warn_of_other_sites(new_rows, site)
        new_rows = replace(new_rows, x=_augmented(new_rows.x, preprocessing.operations))
        if sample_shape(new_rows.x) != self.input_shape:
            shape = f"the rows become samples of shape {sample_shape(new_rows.x)}"
            raise UserError(f"{shape}; the model was trained on {self.input_shape}")
        scales = preprocessing.scales(new_rows.sites if site is None else (site,), len(new_rows.x))
        return self._predicted(new_rows, preprocessing.preparation.output_names, scales)

    def _predicted(self, rows: NewRows, names: Sequence[str], scales: Sequence[TargetScale] | None) -> Predictions:
        task = self._task()
        targets = torch.zeros(len(rows.x)) if rows.y is None else rows.y
        shard = Shard(rows.x, targets, torch.arange(len(targets)))
        recorded: list[Tensor] = []
        parts: list[Mapping[str, Any]] = []
        module = self.module.eval()
        predict = task.predictions
        reason, done = "" if rows.known is not None else rows.no_targets, 0
        with torch.inference_mode():
            for x, y in batches(shard, self.settings.evaluate.batch_size, None, views=True):
                f = self._outputs(module, x)
                if scales is not None:
                    own, done = scales[done : done + len(f)], done + len(f)
                    f = torch.cat([scale.original(row[None]) for scale, row in zip(own, f, strict=True)])
                if not len(parts) and rows.y is not None:
                    reason = _with_place(task.check(y, tuple(f.shape[1:])), rows)
                if rows.y is not None and not reason:
                    recorded.append(contract.hold(task, f, y))
                parts.append(predict(f, names))
            clash = next((name for name in parts[0] if name in rows.ids), None)
            if clash is not None:
                raise UserError(f"ids: {clash!r} is a column of the predictions; rename that of the rows")
            predictions = Predictions(
                {**rows.ids, **{name: _join([part[name] for part in parts]) for name in parts[0]}}
            )
            if recorded:
                every = slice(None) if rows.known is None else rows.known
                predictions.metrics = contract.figures(task, torch.cat(recorded)[every], targets[every])
        predictions.no_metrics = reason or rows.no_targets
        return predictions

    def _task(self) -> Any:
        construct = registry.make(tasks.KIND, self.settings.task, self.settings.origins("task"))
        with seeds.seeded(self.settings.seed, "task"):
            task = construct(self.classes)
        contract.check_task(task)
        return task

    def _outputs(self, module: nn.Module, x: Any) -> Tensor:
        """(B, ...) of the model on the CPU, as an evaluation of the run has them."""
        like = next(iter(module.parameters()), torch.empty(0))
        bf16 = self.settings.compute.precision == "bf16"
        if isinstance(x, Tensor):
            x = to_memory_format(x, self.settings.compute.channels_last)
        try:
            with torch.autocast(like.device.type, torch.bfloat16) if bf16 else nullcontext():
                f = call(module, x.to(like.device))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the model does not take these rows, {describe(x)}: {error}") from error
        if not isinstance(f, Tensor) or f.shape[:1] != (len(x),):
            shown = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise located_error(f"model {type(module).__name__} returned {shown} for {len(x)} samples", module)
        if f.is_floating_point() and not bool(f.isfinite().all()):
            raise UserError("the model gives no finite numbers for some of the rows: it has come apart in training")
        return f.to(like.dtype).cpu()


def with_predict(
    module: nn.Module,
    run: Path,
    settings: Settings,
    name: str,
    client: int | str | None = None,
    overrides: Sequence[str] = (),
) -> nn.Module:
    """The module with a function `predict`, unless it has one of its own.

    Args:
        run, settings, name: the run directory, its settings, and the file in it of the global model.
        client: whose model it is, where it is not the global one.
        overrides: those of the settings that the caller gave; of data those that say how a new file is read.
    """
    if not hasattr(module, "predict"):
        module.predict = predictor(module, run, settings, name, client, overrides)  # type: ignore[assignment]
    return module


def predictor(
    module: nn.Module,
    run: Path,
    settings: Settings,
    name: str,
    client: int | str | None = None,
    overrides: Sequence[str] = (),
) -> Predictor:
    """What predicts new rows with a module; arguments as of `with_predict`."""
    facts = facts_of(run / name)
    given = command_line(overrides).data.get("data")
    own = given if isinstance(given, dict) else {}
    return Predictor(run, settings, module, int(facts["classes"]), input_of(facts)[0], client, own)


def of_training(overrides: Sequence[str]) -> list[str]:
    """The overrides without those that say how a new file is read; the training's files are read as the run did."""
    return [text for text in overrides if text.partition("=")[0].removeprefix("data.") not in ALL]


def site_of(silos: Sequence[str], client: int | str) -> str:
    """The site of a client that is given by its number, or by its site's name."""
    return client if isinstance(client, str) and client in silos else silos[int(client)]


def _augmented(x: Any, operations: tuple[Operation, ...]) -> Any:
    """Samples as tests see them: through the operations that draw nothing."""
    if not operations:
        return x
    if isinstance(x, Inputs):
        raise UserError("data.augment is for pictures, and a sample of these data is several tensors")
    own = replace(x.look if isinstance(x, Pictures) else ImagePipeline(), operations=operations)
    return Pictures(x.stored if isinstance(x, Pictures) else x, own)


def _warn_of_other_sites(rows: NewRows, site: str) -> None:
    """Warn if the file's site column names another site than `site`, whose preprocessing all rows get."""
    others = [k for k, name in enumerate(rows.sites) if name not in (site, "")]
    if others:
        first = rows.where(others[0]) if rows.where is not None else f"row {others[0]}"
        message = (
            f"{len(others)} of {count(len(rows.sites), 'row')} name another site, the first {rows.sites[others[0]]!r}"
        )
        warnings.warn(f"{message} ({first}); all are prepared as rows of {site!r}", stacklevel=3)


def _with_place(reason: str, rows: NewRows) -> str:
    """Return a task's message on `row N` with the row's file and line instead of its number in the first batch."""
    named = re.match(r"row (\d+) ", reason)
    return f"{rows.where(int(named[1]))} {reason[named.end() :]}" if named and rows.where is not None else reason


def _join(parts: Sequence[Any]) -> Any:
    """Columns of several batches as one."""
    return (
        torch.cat(list(parts)).numpy() if isinstance(parts[0], Tensor) else [value for part in parts for value in part]
    )
