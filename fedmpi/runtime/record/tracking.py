"""Trackers, which show runs in programs of others, and callbacks, which are classes of the user's own.

track: [tensorboard, {wandb: {project: mine}}]        `fedmpi list trackers`
callbacks: [mine.py:Watch, {mine.py:Watch: {every: 5}}]

Rank 0 calls them with copies, and an error in them does not end the run: one that raises, or exits, is not called
again, and a warning says so. A class of `callbacks` may have any of these; options of the config are arguments of its
__init__:

    begin(run)      run: name, directory, id, settings, first (the first round that it will get), going_on
    round(row)      the line of metrics.jsonl, as a dict
    end(summary)    summary.json, as a dict; not called for a run that fails

Each gets every round once, also when a run is resumed: heard.json has the last round that each of them got. Trackers
count steps by the number of completed rounds.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.redaction import redacted
from fedmpi.common.registry import PluginKind, Selection, make
from fedmpi.config import Settings
from fedmpi.config.field_types import flat
from fedmpi.runtime.reading.files import json_of
from fedmpi.runtime.record.run_dir import RunDirectory

registry: dict[str, str] = {
    "mlflow": "fedmpi.runtime.record.tracking:MLflow",
    "tensorboard": "fedmpi.runtime.record.tracking:TensorBoard",
    "wandb": "fedmpi.runtime.record.tracking:WandB",
}
KIND = PluginKind("tracker", registry, "track")
FILE = "heard.json"
HOOKS = ("begin", "round", "end")
MLFLOW_PARAMS = 100  # at a time, which MLflow takes
NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w.\- ]")  # such as the @ of accuracy@SITE


@dataclass
class LoggerCollection:
    """The trackers and callbacks of a run."""

    each: dict[str, Any]  # place in the config -> the object
    directory: RunDirectory | None = None
    last_rounds: dict[str, int] = field(default_factory=dict)  # place in the config -> the last round that it got
    id: str = ""

    def begin(self, settings: Settings, directory: RunDirectory, first: int, going_on: bool) -> None:
        self.directory = directory
        known = (json_of(directory.path / FILE) or {}) if going_on else {}
        self.id, last_rounds = known.get("id") or uuid.uuid4().hex[:16], known.get("told", {})
        self.last_rounds = {name: int(last_rounds.get(name, -2)) for name in self.each}
        about = {"name": directory.path.name, "directory": str(directory.path.absolute()), "id": self.id}
        about |= {"settings": redacted(settings.model_dump(mode="json")), "going_on": going_on}
        self._write()
        for name in list(self.each):
            self._call(name, "begin", {**about, "first": max(first, self.last_rounds[name] + 1)})

    def round(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics.jsonl. That is recorded first: a kill in between loses the round for them, where it
        would have them get it twice."""
        names = [name for name in self.each if row["round"] > self.last_rounds[name]]
        self.last_rounds |= dict.fromkeys(names, row["round"])
        self._write()
        for name in names:
            self._call(name, "round", row)

    def end(self, summary: Mapping[str, Any]) -> None:
        for name in list(self.each):
            self._call(name, "end", summary)

    def _call(self, name: str, hook: str, argument: Mapping[str, Any]) -> None:
        try:
            with _preserve_process_state():
                getattr(self.each[name], hook, lambda _: None)(to_jsonable(argument))
        except (Exception, SystemExit) as error:
            del self.each[name]
            at = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            where = f"{at.filename}:{at.lineno}: {reason}"
            warnings.warn(f"{name}: {hook}: {where}; it is told nothing more, and the run goes on", stacklevel=2)

    def _write(self) -> None:
        assert self.directory is not None
        self.directory.write_json(FILE, {"id": self.id, "told": self.last_rounds})


def make_loggers(settings: Settings) -> LoggerCollection:
    """Make the trackers and callbacks that the config names.

    Raises UserError: an unknown name or option, a package that is not installed, a class that has none of the hooks, an
    error in its __init__.
    """
    loggers: dict[str, Any] = {}
    for key, items in (("track", settings.track), ("callbacks", settings.callbacks)):
        for i, item in enumerate(items):
            name, options = (item, None) if isinstance(item, str) else next(iter(item.items()))
            place = f"{key}: {name}"
            number = sum(each == place or each.startswith(f"{place} #") for each in loggers) + 1
            logger = _make_logger(settings, key, f"{key}.{i}", name, options or {})
            loggers[place if number == 1 else f"{place} #{number}"] = logger
    return LoggerCollection(loggers)


def _make_logger(settings: Settings, key: str, where: str, name: str, options: Any) -> Any:
    if not isinstance(options, dict):
        raise UserError(f"{where}.{name}: {options!r} is not allowed; it takes options by their names")
    label, known = (KIND.label, registry) if key == "track" else ("callback", {})
    kind = PluginKind(label, known, f"{where}.{name}")
    construct = make(kind, Selection(name, options), settings.origins(f"{where}.{name}"))
    try:
        logger = construct()
    except ImportError as error:
        raise UserError(f"{where}: {name} needs a package: {error}; pip install 'fedmpi[{name}]'") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {name} cannot be made: {type(error).__name__}: {error}") from error
    if not any(callable(getattr(logger, hook, None)) for hook in HOOKS):
        raise UserError(f"{where}: {name} has no {', '.join(HOOKS)}; a class with one of them is needed")
    return logger


@contextmanager
def _preserve_process_state() -> Iterator[None]:
    """Set back afterwards what code of others may have changed in this process."""
    where, grad, dtype, drawn = os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype(), seeds.state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        os.chdir(where)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        seeds.set_state(drawn)
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- trackers ----
def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl by name; those inside objects have dotted names."""
    values = flat(dict(row), "")
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "round"}


class TensorBoard:
    """TensorBoard's event files, in RUN_DIR/tensorboard: `tensorboard --logdir runs` shows all runs below it."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.kind = SummaryWriter

    def begin(self, run: dict[str, Any]) -> None:
        self.writer = self.kind(f"{run['directory']}/tensorboard")

    def round(self, row: dict[str, Any]) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"] + 1)
        self.writer.flush()

    def end(self, summary: dict[str, Any]) -> None:
        self.writer.close()


class MLflow:
    """MLflow's store of files, in OUTPUT/mlruns: `mlflow ui --backend-store-uri OUTPUT/mlruns` shows it.

    uri: another store, or a server. experiment: under which name.
    """

    def __init__(self, uri: str | None = None, experiment: str = "fedmpi") -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it newer ones ask for a data base
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client_of, self.metric, self.param = MlflowClient, Metric, Param
        self.uri, self.experiment = uri, experiment

    def begin(self, run: dict[str, Any]) -> None:
        self.client = self.client_of(tracking_uri=self.uri or (Path(run["directory"]).parent / "mlruns").as_uri())
        known = self.client.get_experiment_by_name(self.experiment)
        within = known.experiment_id if known else self.client.create_experiment(self.experiment)
        known_runs = self.client.search_runs([within], f"tags.`fedmpi.id` = '{run['id']}'")
        if known_runs:
            self.run = known_runs[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        tags = {"fedmpi.id": run["id"], "fedmpi.directory": run["directory"]}
        self.run = self.client.create_run(within, tags=tags, run_name=run["name"]).info.run_id
        params = [self.param(key, str(value)[:500]) for key, value in flat(run["settings"], "").items()]
        for at in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(self.run, params=params[at : at + MLFLOW_PARAMS])

    def round(self, row: dict[str, Any]) -> None:
        now, step = int(time.time() * 1000), row["round"] + 1
        named = {NOT_IN_MLFLOW_NAMES.sub("_", name): value for name, value in numbers(row).items()}
        self.client.log_batch(self.run, metrics=[self.metric(name, value, now, step) for name, value in named.items()])

    def end(self, summary: dict[str, Any]) -> None:
        is_finished = summary["exit_reason"].startswith(("finished", "early stopped"))
        self.client.set_terminated(self.run, "FINISHED" if is_finished else "KILLED")


class WandB:
    """Weights & Biases, offline, in RUN_DIR/wandb: `wandb sync` uploads it later.

    project: under which name. mode: online, to upload at once.
    """

    def __init__(self, project: str = "fedmpi", mode: str = "offline") -> None:
        import wandb

        self.wandb, self.project, self.mode = wandb, project, mode

    def begin(self, run: dict[str, Any]) -> None:
        quiet = self.wandb.Settings(silent=True, console="off")
        given = {"id": run["id"], "resume": "allow", "name": run["name"], "dir": run["directory"], "settings": quiet}
        self.run = self.wandb.init(project=self.project, mode=self.mode, config=run["settings"], **given)

    def round(self, row: dict[str, Any]) -> None:
        self.run.log(numbers(row), step=row["round"] + 1)

    def end(self, summary: dict[str, Any]) -> None:
        self.run.finish()
