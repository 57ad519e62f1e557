"""The Python interface of fedmpi, for notebooks, scripts and the ranks of a job."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.reports import write_report_after_run
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs.models import RunModel
from fedmpi.runtime.finished_runs.predict import Predictor

__all__ = ["Summary", "load", "run"]


class Summary(dict[str, Any]):
    """The content of a run's summary.json, and the path of its run directory under the key `directory`.

    On ranks other than 0 the summary is empty.
    """


def run(settings: str | Path | config.Settings, overrides: Sequence[str] = ()) -> Summary:
    """Run one experiment on the ranks that a launcher started, or in this process if there is no launcher.

    Args:
        settings: a YAML file, or settings that `fedmpi.config.load` returned.
        overrides: changes to the file's settings, written as on the command line: `["train.epochs=3"]`.

    Returns:
        The summary of the run; an empty one on ranks other than 0.

    Raises:
        UserError: if there is a mistake in the config or the data.
    """
    if isinstance(overrides, str):
        raise UserError(
            f"fedmpi.run: overrides: {overrides!r} is not allowed; must be a list of strings such as ['train.epochs=3']"
        )
    if not isinstance(settings, config.Settings):
        settings = config.load(settings, overrides)
    elif overrides:
        raise UserError("fedmpi.run: overrides cannot change loaded settings; pass them to fedmpi.config.load")
    return Summary(execute_run(settings, on_finish=write_report_after_run)[0])


def load(
    path: str | Path,
    trust: bool = False,
    best: bool = False,
    client: int | str | None = None,
    overrides: Sequence[str] = (),
) -> nn.Module:
    """Load a trained model from a run directory, in evaluation mode: the global model, or the model of one client.

    The model has a function `predict(rows, site=None, ids=())`, which prepares new rows in the same way as the training
    data and returns the columns that `fedmpi predict` writes. Depending on the run's data source, rows are a file (in
    the formats of that command), a DataFrame, a mapping of columns, a list of files, or an array.
    A warning is issued if clients use models other than the global model, or if the global model contains parts that
    are trained only at the clients (FedPer's heads) and thus have their initial values. A client's model is the one
    that the evaluation protocol `personal` evaluates, without fine-tuning. With kNN-Per its outputs depend on the
    client's training data, which must be available.

    Args:
        path: a directory written by `fedmpi run`.
        trust: whether to execute code outside fedmpi that the config names, such as a model `file.py:Name`.
        best: whether to load the best model (evaluate.best) instead of the final model.
        client: the number of a client, or the name of its site if clients are sites; None: the global model.
        overrides: changes to the run's settings, written as on the command line: `["data.root=DIR"]`. Settings that
            define how a file is read, such as `data.delimiter`, apply to the rows given to `predict`.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: if the path is not a run directory, the run has not ended yet, files are damaged, code outside fedmpi
            is needed and `trust` is false, or the client does not exist or has no state in this directory.
    """
    run_model = RunModel(Path(path), trust, overrides, best, client)
    settings = run_model.load_settings()
    module = run_model.load(settings)
    if client is None and settings.data.standardise_target:
        warnings.warn(
            "the model returns standardised targets (data.standardise_target); use its function predict to get values "
            "in the original unit",
            stacklevel=2,
        )
    if not hasattr(module, "predict"):
        module.predict = Predictor(module, run_model, settings)  # type: ignore[assignment]
    return module
