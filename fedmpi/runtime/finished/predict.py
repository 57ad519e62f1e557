"""`fedmpi predict`: what a run's model predicts of the rows of a file, as a CSV or .npz file."""

from __future__ import annotations

import csv
import io
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.comm.launchers.launcher_env import detect
from fedmpi.common.errors import UserError
from fedmpi.common.text import count, figure
from fedmpi.config.schema import Settings
from fedmpi.runtime import trust
from fedmpi.runtime.device import pick_device, set_numerics
from fedmpi.runtime.finished.client_model import client_model
from fedmpi.runtime.record import durable
from fedmpi.runtime.record.model_facts import facts_of, personal_notice
from fedmpi.runtime.record.predictor import Predictions, of_training, predictor
from fedmpi.runtime.record.run_dir import BEST, MODEL
from fedmpi.runtime.record.saved_model import rebuilt

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
            module = rebuilt(run, settings, name).to(pick_device(settings, detect({})))
            if said := personal_notice(facts_of(run / name)):
                warnings.warn(said, stacklevel=2)
        found = predictor(module, run, settings, name, client, given)(file, site=site, ids=ids)
    return write(found, out or run / FOLDER / file.name, out is not None, settings, say)


def write(found: Predictions, to: Path, exact: bool, settings: Settings, say: Callable[[str], None]) -> Path:
    """Write predictions; what has several numbers a row, such as masks, goes into an .npz file. exact: `to` is the
    file, and not what its name is made of."""
    arrays = {name: np.asarray(values) for name, values in found.items()}
    suffix = ".npz" if any(array.ndim > 1 for array in arrays.values()) else ".csv"
    if exact and (to.suffix.lower() != suffix or to.is_dir()):
        raise UserError(f"--to: {to}: a file whose name ends in {suffix} is needed for these predictions")
    path = to if exact else to.with_name(f"{to.stem}{suffix}")
    content = _npz(arrays) if suffix == ".npz" else _csv(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, content, settings.output_mode == "private")
    except OSError as error:
        raise UserError(f"--to: cannot write {path}: {error.strerror or error}; choose another file") from error
    many = len(next(iter(arrays.values())))
    shown = "; ".join(f"{name} {figure(name, value)}" for name, value in found.metrics.items())
    say(f"{path}: {count(many, 'row')}{f', by the targets in the file: {shown}' if shown else ''}")
    if found.no_metrics:
        say(f"{'metrics' if found.metrics else 'no metric'}: {found.no_metrics}")
    return path


def _csv(found: Predictions) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found)
    writer.writerows(zip(*(_cells(values) for values in found.values()), strict=True))
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
