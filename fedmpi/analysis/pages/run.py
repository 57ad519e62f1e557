"""One run directory as it is read for a report: whole, cut short, still growing, or damaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.metrics_row import NOT_METRICS
from fedmpi.common.text import count, lower_is_better
from fedmpi.config import yaml_source
from fedmpi.config.field_types import flat
from fedmpi.runtime.reading import digests
from fedmpi.runtime.record import timeline
from fedmpi.runtime.record.data_files import by_client

Row = dict[str, Any]


class Run:
    """One run directory. What cannot be read is empty, and said in `notes`."""

    def __init__(self, path: Path) -> None:
        self.path, self.notes = path, list[str]()
        self.config = flat(self._yaml("config.yaml"), "")  # dotted key -> value
        self.rows = self.lines("metrics.jsonl")
        self.clients = self.lines("clients.jsonl", needed=False)
        self.summary, self.environment = self.object("summary.json", needed=False), self.object("environment.json")
        self.identity, self.partition = self.object("identity.json", needed=False), self.object("partition.json")
        self.digests = digests.fixed(self.identity)
        self.faults = self.lines("faults.jsonl", needed=False)
        self.updates = self.lines("updates.jsonl", needed=False)
        self.analysis = self.lines("analysis.jsonl", needed=False)
        self.name = str(self.config.get("name", path.name))

    @cached_property
    def by_client(self) -> tuple[Any, Any]:
        """Training samples of each client, and of each class at each client; None where that is not known."""
        try:
            return by_client(self.path, self.partition)
        except ValueError as error:
            self.notes.append(str(error))
            return None, None

    @cached_property
    def timeline(self) -> list[dict[str, Any]]:
        """The jobs, the oldest first (runtime/record/timeline.py)."""
        try:
            return timeline.read(self.path)
        except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.notes.append(f"{timeline.FOLDER} cannot be read ({error!r})")
            return []

    @cached_property
    def client_names(self) -> dict[int, str]:
        """Of clients that are sites: their names, as the config or their evaluation tells them. Where several clients
        share a site, with their numbers."""
        silos = self.config.get("data.silos")
        named = dict(enumerate(map(str, silos))) if isinstance(silos, list) else {}
        told = [row for row in self.clients if "site" in row and isinstance(row.get("client"), int)]
        named |= {row["client"]: str(row["site"]) for row in told}
        many = Counter(named.values())
        return {k: name if many[name] < 2 else f"{name} ({k})" for k, name in named.items()}

    def client_name(self, client: int) -> str:
        """Its site's name, or its number."""
        return self.client_names.get(client, str(client))

    @property
    def seed(self) -> str:
        return str(self.config.get("seed", ""))

    @property
    def state(self) -> str:
        """How it ended, or that it has not."""
        return str(self.summary.get("exit_reason", "")) or "not ended: going on, or killed"

    @property
    def complete(self) -> bool:
        """Whether it ended as it was meant to."""
        return self.state == "finished" or self.state.startswith("enough")

    def last(self, name: str) -> float | None:
        """A figure of the last round that was evaluated for it; None where that was no number: an earlier round's does
        not stand for it."""
        return number(next((row[name] for row in reversed(self.rows) if name in row), None))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(rounds, values) of a figure in metrics.jsonl, where it is a number."""
        pairs = [(row["round"], value) for row in self.rows if (value := number(row.get(name))) is not None]
        return [t for t, _ in pairs], [value for _, value in pairs]

    @cached_property
    def own_figures(self) -> list[str]:
        """Numbers that the method has reported of its server's step: they stand between what the engine says of it and
        what came later (engine/federation.py)."""
        return [name for name in self._numbers if name in self._reported]

    @cached_property
    def figures(self) -> list[str]:
        """Figures of training and evaluation in metrics.jsonl, those of which more is better first."""
        found = [name for name in self._numbers if name not in NOT_METRICS and name not in self._reported]
        return sorted(found, key=self.falls)

    def falls(self, name: str) -> bool:
        """Whether less of a figure is better."""
        own = self.summary.get("falling")
        return lower_is_better(name, map(str, own) if isinstance(own, list) else ())

    @cached_property
    def _numbers(self) -> list[str]:
        return list(dict.fromkeys(k for row in self.rows for k, v in row.items() if number(v) is not None))

    @cached_property
    def _reported(self) -> set[str]:
        found = set[str]()
        for names in (list(row) for row in self.rows):
            if "server_s" in names and "sent_bytes" in names:
                found.update(names[names.index("server_s") + 1 : names.index("sent_bytes")])
        return found

    def lines(self, name: str, *, needed: bool = True, rounds: bool = True) -> list[Row]:
        """The rows of a .jsonl file (rounds: of those with a `round`); other lines are counted in `notes`."""
        if needed and not (self.path / name).exists():
            self._missing(name)
        try:
            found = read_jsonl(self.path / name, rounds=rounds)
        except UserError as error:
            self.notes.append(str(error))
            return []
        if bad := len(found.damaged) + found.cut:
            self.notes.append(f"{name}: {count(bad, 'line')} cut or damaged, and left out")
        return found.rows

    def object(self, name: str, *, needed: bool = True) -> Row:
        """The object in a .json file; {} where there is none."""
        text = self._text(name, needed=needed)
        try:
            value = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.notes.append(f"{name} is damaged: no JSON object")
            return {}
        return value

    def _yaml(self, name: str) -> Row:
        """Without references to the environment: fedmpi writes none, and others shall not read what is in ours."""
        path = self.path / name
        if not path.exists():
            return self._missing(name)
        try:
            if yaml_source.OPEN in yaml_source.read_text(path):
                self.notes.append(f"{name} refers to environment variables, and is not read")
                return {}
            return yaml_source.read(path).data
        except UserError as error:
            self.notes.append(str(error))
            return {}

    def _text(self, name: str, *, needed: bool) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "" if not needed else str(self._missing(name) or "")
        except OSError as error:
            self.notes.append(f"{name} cannot be read: {error.strerror}")
            return ""

    def _missing(self, name: str) -> Row:
        self.notes.append(f"there is no {name}")
        return {}


def named(value: Any) -> str:
    """What a setting names, of a plug-in without the folders of its file.

    >>> named("/home/me/mine.py:Mine"), named("fedavg")
    ('mine.py:Mine', 'fedavg')
    """
    return "" if value is None else str(value).rpartition("/")[2]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
