"""fedmpi for Python programs: in a notebook, in a script, or on the ranks of a job."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.reports import after_run
from fedmpi.runtime.finished.models import RunModel
from fedmpi.runtime.finished.predict import Predictor
from fedmpi.runtime.run import execute

__all__ = ["Summary", "load", "run"]


class Summary(dict[str, Any]):
    """The contents of a run's summary.json, and `directory`, its path; empty on ranks other than 0."""


def run(settings: str | Path | config.Settings, overrides: Sequence[str] = ()) -> Summary:
    """Run one experiment, on the ranks of the launcher, or without one in this process.

    Args:
        settings: a YAML file, or settings made by `fedmpi.config.load`.
        overrides: as on the command line, `["train.epochs=3"]`.

    Raises:
        UserError: a mistake in config or data.
    """
    if isinstance(overrides, str):
        raise UserError(f"fedmpi.run: overrides is {overrides!r}; a list of texts is needed: ['train.epochs=3']")
    if not isinstance(settings, config.Settings):
        settings = config.load(settings, overrides)
    elif overrides:
        raise UserError("fedmpi.run: these settings are made; give the overrides to fedmpi.config.load")
    return Summary(execute(settings, after=after_run)[0])


def load(
    path: str | Path,
    trust: bool = False,
    best: bool = False,
    client: int | str | None = None,
    overrides: Sequence[str] = (),
) -> nn.Module:
    """Return a model of a run directory, in evaluation mode: the global one, or what one client uses.

    Its function `predict(rows, site=None, ids=())` prepares new rows as those of the training were, and returns the
    columns that `fedmpi predict` writes; rows: a file as that command takes it, a DataFrame, a mapping of columns, a
    list of files, or an array, as the run's data source has them.
    A warning says where clients use other models than the global one, or where the global one has initial values in the
    parts that clients keep (FedPer's heads). A client's model is the one that protocol `personal` evaluates, without
    fine-tuning. With kNN-Per its outputs look into the client's training data, which must be there.

    Args:
        path: a directory written by `fedmpi run`.
        trust: whether to run the code of others that its config names: a model `file.py:Name`, say.
        best: the best model by evaluate.best, in place of the final one.
        client: the number of a client, or with data.silos the name of a site; None: the global model.
        overrides: of the run's settings, as on the command line: `["data.root=DIR"]`; those that say how a file is
            read, such as `data.delimiter`, are for the rows given to `predict`.

    Raises:
        UserError: no run directory, its run has not ended yet, damaged files; code of others without `trust`; a client
            that does not exist, or whose state is not in this directory.
    """
    which = RunModel(Path(path), trust, overrides, best, client)
    settings = which.settings()
    module = which.load(settings)
    if client is None and settings.data.standardise_target:
        warnings.warn(
            "the model's outputs are standardised targets (data.standardise_target); its function predict gives "
            "them in the unit of the targets",
            stacklevel=2,
        )
    if not hasattr(module, "predict"):
        module.predict = Predictor(module, which, settings)  # type: ignore[assignment]
    return module
