"""Rank 0 tells trackers and callbacks of the run: what they hear are copies, and what goes wrong in them ends nothing.

A class of `callbacks` may have any of these; options of the config are arguments of its __init__:

    begin(run)      run: name, directory, id, settings, first (the round that is heard of first), going_on
    round(row)      the line of metrics.jsonl, as a dict
    end(summary)    summary.json, as a dict; not called for a run that fails

Each round is told once, also by a run that goes on: heard.json says how far each one has heard. One that raises, or
leaves, is told nothing more, and a warning says so.
"""

from __future__ import annotations

import os
import signal
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.redaction import redacted
from fedmpi.config import Settings
from fedmpi.runtime.reading.files import json_of
from fedmpi.runtime.record import tracking
from fedmpi.runtime.record.run_dir import RunDirectory

FILE = "heard.json"
HOOKS = ("begin", "round", "end")


@dataclass
class LoggerCollection:
    """The trackers and callbacks of a run. each: where it stands in the config -> the object."""

    each: dict[str, Any]
    directory: RunDirectory | None = None
    told: dict[str, int] = field(default_factory=dict)
    id: str = ""

    def begin(self, settings: Settings, directory: RunDirectory, first: int, going_on: bool) -> None:
        self.directory = directory
        known = (json_of(directory.path / FILE) or {}) if going_on else {}
        self.id, told = known.get("id") or uuid.uuid4().hex[:16], known.get("told", {})
        self.told = {name: int(told.get(name, -2)) for name in self.each}
        about = {"name": directory.path.name, "directory": str(directory.path.absolute()), "id": self.id}
        about |= {"settings": redacted(settings.model_dump(mode="json")), "going_on": going_on}
        self._write()
        for name in list(self.each):
            self._tell(name, "begin", {**about, "first": max(first, self.told[name] + 1)})

    def round(self, row: Mapping[str, Any]) -> None:
        """Before anybody hears of it, it is written down that they have: a kill in between loses a round rather than
        doubling it."""
        t = int(row["round"])
        names = [name for name in self.each if t > self.told[name]]
        if names:
            self.told |= dict.fromkeys(names, t)
            self._write()
        for name in names:
            self._tell(name, "round", row)

    def end(self, summary: Mapping[str, Any]) -> None:
        for name in list(self.each):
            self._tell(name, "end", summary)

    def _tell(self, name: str, hook: str, what: Mapping[str, Any]) -> None:
        call: Callable[[Any], Any] | None = getattr(self.each[name], hook, None)
        if call is None:
            return
        try:
            with _preserve_process_state():
                call(to_jsonable(what))
        except (Exception, SystemExit) as error:
            del self.each[name]
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(f"{type(error).__name__}: {error}".split())
            where = f"{at.filename}:{at.lineno}: {said}"
            warnings.warn(f"{name}: {hook}: {where}; it is told nothing more, and the run goes on", stacklevel=2)

    def _write(self) -> None:
        assert self.directory is not None
        self.directory.write_json(FILE, {"id": self.id, "told": self.told})


def make_loggers(settings: Settings) -> LoggerCollection:
    """Those whom the config names. Raises UserError: an unknown name or option, a package that is not installed, a
    class that has none of the hooks, an error in its __init__."""
    found: dict[str, Any] = {}
    for key, items in (("track", settings.track), ("callbacks", settings.callbacks)):
        for i, item in enumerate(items):
            name, options = (item, None) if isinstance(item, str) else next(iter(item.items()))
            found[_unique(f"{key}: {name}", found)] = _made(settings, key, f"{key}.{i}", name, options)
    return LoggerCollection(found)


def _made(settings: Settings, key: str, where: str, name: str, options: Any) -> Any:
    known = tracking.registry if key == "track" else {}
    origins = settings.origins(f"{where}.{name}")
    if not isinstance(options or {}, dict):
        raise UserError(f"{where}.{name}: {options!r} is not allowed; it takes options by their names")
    kind = registry.PluginKind(tracking.KIND.label if known else "callback", known, f"{where}.{name}")
    make = registry.make(kind, registry.Selection(name, options or {}), origins)
    try:
        made = make()
    except ImportError as error:
        raise UserError(f"{where}: {name} needs a package: {error}; pip install 'fedmpi[{name}]'") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {name} cannot be made: {type(error).__name__}: {error}") from error
    if not any(callable(getattr(made, hook, None)) for hook in HOOKS):
        raise UserError(f"{where}: {name} has no {', '.join(HOOKS)}; a class with one of them is needed")
    return made


def _unique(name: str, known: Mapping[str, Any]) -> str:
    number = sum(each == name or each.startswith(f"{name} #") for each in known) + 1
    return name if number == 1 else f"{name} #{number}"


@contextmanager
def _preserve_process_state() -> Iterator[None]:
    """What others' code may change of this process is as it was before it."""
    where, grad, threads = os.getcwd(), torch.is_grad_enabled(), torch.get_num_threads()
    dtype, drawn = torch.get_default_dtype(), seeds.state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        os.chdir(where)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        seeds.set_state(drawn)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
