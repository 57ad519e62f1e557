"""Pass the results of a run to loggers (such as TensorBoard) and to callbacks (classes that the user writes).

loggers: [tensorboard, {wandb: {project: mine}}]        `fedmpi list loggers`
callbacks: [mine.py:Watch, {mine.py:Watch: {every: 5}}]

Rank 0 calls loggers and callbacks with copies of its data. An error in one of them does not end the run: it causes a
warning, and that logger or callback is not called again. A class of `callbacks` has one or more of the following
methods; its options in the config are the arguments of its __init__:

    begin(run)      run: a dict with name, directory, id, settings, first (the first round that `round` will receive)
                    and resumed (whether the run is resumed)
    round(row)      row: the row of metrics.jsonl, as a dict
    end(summary)    summary: the content of summary.json, as a dict; not called if the run fails

If a resumed run repeats rounds, `round` receives their rows again. Loggers use the number of completed rounds as the
step. The file logger_state.json contains the id under which loggers know the run.
"""

from __future__ import annotations

import os
import signal
import traceback
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.redaction import redact
from fedmpi.common.registry import PluginKind, Selection, make_component
from fedmpi.common.type_descriptions import shorten_value
from fedmpi.config import Settings
from fedmpi.config.field_types import flatten
from fedmpi.runtime.inspection.run_files import read_json_object
from fedmpi.runtime.record.run_dir import RunDirectory

registry: dict[str, str] = {
    "tensorboard": "fedmpi.runtime.record.loggers:TensorBoard",
    "wandb": "fedmpi.runtime.record.loggers:WandB",
}
KIND = PluginKind("logger", registry, "loggers")
STATE_FILE = "logger_state.json"
HOOKS = ("begin", "round", "end")


class LoggerCollection:
    """The loggers and callbacks of a run.

    loggers: a dict from the config key and name of each object, such as "loggers.0: wandb", to the object.
    """

    def __init__(self, loggers: dict[str, Any]) -> None:
        self.loggers = loggers

    def begin(self, settings: Settings, directory: RunDirectory, first: int, resumed: bool) -> None:
        known = (read_json_object(directory.path / STATE_FILE) or {}) if resumed else {}
        about = {"id": known.get("id") or uuid.uuid4().hex[:16], "name": directory.path.name, "first": first}
        directory.write_json(STATE_FILE, {"id": about["id"]})
        about |= {"directory": str(directory.path.absolute()), "resumed": resumed}
        self._call_hook("begin", {**about, "settings": redact(settings.model_dump(mode="json"))})

    def round(self, row: Mapping[str, Any]) -> None:
        """Call the method `round` of all loggers with a row of metrics.jsonl."""
        self._call_hook("round", row)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._call_hook("end", summary)

    def _call_hook(self, hook: str, argument: Mapping[str, Any]) -> None:
        for name, logger in list(self.loggers.items()):
            try:
                with _preserve_process_state():
                    getattr(logger, hook, lambda _: None)(to_jsonable(argument))
            except (Exception, SystemExit) as error:
                del self.loggers[name]
                at = traceback.extract_tb(error.__traceback__)[-1]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                where = f"{at.filename}:{at.lineno}: {reason}"
                warnings.warn(f"{name}: {hook}: {where}; it is not called again, and the run continues", stacklevel=2)


def make_loggers(settings: Settings) -> LoggerCollection:
    """Make the loggers and callbacks of the config (keys `loggers` and `callbacks`).

    Raises:
        UserError: A name or option is unknown, a package is not installed, a class has none of the methods `begin`,
            `round` and `end`, or its __init__ raises an error.
    """
    loggers: dict[str, Any] = {}
    for key, items in (("loggers", settings.loggers), ("callbacks", settings.callbacks)):
        for i, item in enumerate(items):
            name, options = (item, None) if isinstance(item, str) else next(iter(item.items()))
            logger = _make_logger(settings, key, f"{key}.{i}", name, options or {})
            loggers[f"{key}.{i}: {name}"] = logger
    return LoggerCollection(loggers)


def _make_logger(settings: Settings, key: str, where: str, name: str, options: Any) -> Any:
    if not isinstance(options, dict):
        raise UserError(
            f"{where}.{name}: {shorten_value(options)} is not allowed; must be a mapping of option names to values"
        )
    label, known = (KIND.label, registry) if key == "loggers" else ("callback", {})
    kind = PluginKind(label, known, f"{where}.{name}")
    construct = make_component(kind, Selection(name, options), settings.key_origins(f"{where}.{name}"))
    try:
        logger = construct()
    except ImportError as error:
        message = f"{where}: {name} needs a package that is not installed: {error}"
        raise UserError(f"{message}; run pip install 'fedmpi[{name}]'") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {name} cannot be created: {type(error).__name__}: {error}") from error
    if not any(callable(getattr(logger, hook, None)) for hook in HOOKS):
        raise UserError(f"{where}: {name} has none of the functions {', '.join(HOOKS)}; define at least one of them")
    return logger


@contextmanager
def _preserve_process_state() -> Iterator[None]:
    """Restore working directory, random generators, torch defaults and signal handlers at the end of this context."""
    where, grad, dtype, drawn = os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype(), seeds.get_rng_state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        os.chdir(where)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        seeds.set_rng_state(drawn)
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- loggers ----
def numeric_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers except `round` in a row of metrics.jsonl, by name; nested numbers get dotted names."""
    values = flatten(dict(row), "")
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "round"}


class TensorBoard:
    """Writes TensorBoard event files to RUN_DIR/tensorboard; `tensorboard --logdir runs` shows all runs in runs/."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.kind = SummaryWriter

    def begin(self, run: dict[str, Any]) -> None:
        # Hides the values that an earlier job wrote for rounds that are now trained again.
        self.writer = self.kind(f"{run['directory']}/tensorboard", purge_step=run["first"] + 1)

    def round(self, row: dict[str, Any]) -> None:
        for name, value in numeric_values(row).items():
            self.writer.add_scalar(name, value, row["round"] + 1)
        self.writer.flush()

    def end(self, summary: dict[str, Any]) -> None:
        self.writer.close()


class WandB:
    """Logs to Weights & Biases, by default offline in RUN_DIR/wandb, from where `wandb sync` uploads the run later.

    project: the name of the project. mode: online to upload during the run, or offline.
    """

    def __init__(self, project: str = "fedmpi", mode: str = "offline") -> None:
        import wandb

        self.wandb, self.project, self.mode = wandb, project, mode

    def begin(self, run: dict[str, Any]) -> None:
        quiet = self.wandb.Settings(silent=True, console="off")
        given = {"id": run["id"], "resume": "allow", "name": run["name"], "dir": run["directory"], "settings": quiet}
        self.run = self.wandb.init(project=self.project, mode=self.mode, config=run["settings"], **given)

    def round(self, row: dict[str, Any]) -> None:
        self.run.log(numeric_values(row), step=row["round"] + 1)

    def end(self, summary: dict[str, Any]) -> None:
        self.run.finish()
