"""Read a run directory for a report, even if it is incomplete, growing or damaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.metrics_row import NOT_METRICS
from fedmpi.common.text import count, lower_is_better
from fedmpi.config import yaml_source
from fedmpi.config.field_types import flat
from fedmpi.runtime.record import data_files

Row = dict[str, Any]
Curve = dict[int, float]  # round -> value
NEEDED = ("config.yaml", "metrics.jsonl", "environment.json", "partition.json")
T = TypeVar("T")


class Run:
    """One run directory. A file that cannot be read is empty, with a line in `notes`.

    Attributes:
        config: dotted key -> value.
        rows, clients, faults, updates, analysis: of the files NAME.jsonl.
        summary, environment, identity, partition: of the files NAME.json.
        complete: whether it ended as it was meant to.
        last: name -> value in the last row that has it; None if that is not a number.
        metrics: names of those of training and evaluation, the ones of which more is better first.
        own_metrics: names of those that the method has reported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = [f"there is no {name}" for name in NEEDED if not (path / name).exists()]
        self.config = self._read_config()
        self.rows, self.clients, self.faults, self.updates, self.analysis = (
            self.lines(f"{name}.jsonl") for name in ("metrics", "clients", "faults", "updates", "analysis")
        )
        self.summary, self.environment, self.identity, self.partition = (
            self._object(f"{name}.json") for name in ("summary", "environment", "identity", "partition")
        )
        self.name, self.seed = str(self.config.get("name", path.name)), str(self.config.get("seed", ""))
        self.state = str(self.summary.get("exit_reason", "")) or "not ended: going on, or killed"
        self.complete = self.state == "finished" or self.state.startswith("early stopped")
        self.rounds = [row["round"] for row in self.rows if row["round"] >= 0]
        self.last = {name: number(value) for row in self.rows for name, value in row.items()}  # None if it is none
        numbers, own = dict[str, None](), set[str]()
        for row in self.rows:
            names = list(row)
            numbers |= dict.fromkeys(name for name in names if number(row[name]) is not None)
            if "server_s" in names and "sent_bytes" in names:  # between them is what the method has reported
                own.update(names[names.index("server_s") + 1 : names.index("sent_bytes")])
        self.own_metrics = [name for name in numbers if name in own]
        self.metrics = sorted((name for name in numbers if name not in own and name not in NOT_METRICS), key=self.falls)

    @cached_property
    def by_client(self) -> tuple[Any, Any]:
        """(training samples by client, by client and class); None for what is not known."""
        try:
            return data_files.by_client(self.path, self.partition)
        except ValueError as error:
            self.notes.append(str(error))
            return None, None

    @cached_property
    def client_names(self) -> dict[int, str]:
        """{client: name of its site}, from config or clients.jsonl; with its number where a site has several."""
        silos = self.config.get("data.silos")
        names = dict(enumerate(map(str, silos))) if isinstance(silos, list) else {}
        for row in self.clients:
            if "site" in row and isinstance(row.get("client"), int):
                names[row["client"]] = str(row["site"])
        many = Counter(names.values())
        return {k: name if many[name] < 2 else f"{name} ({k})" for k, name in names.items()}

    def falls(self, name: str) -> bool:
        """Return whether less of a metric is better."""
        own = self.summary.get("falling")
        return lower_is_better(name, map(str, own) if isinstance(own, list) else ())

    def lines(self, name: str, *, rounds: bool = True) -> list[Row]:
        """Return the rows of a .jsonl file; damaged lines are counted in `notes`. rounds: rows need a `round`."""
        try:
            content = read_jsonl(self.path / name, rounds=rounds)
        except UserError as error:
            self.notes.append(str(error))
            return []
        if bad := len(content.damaged) + content.cut:
            self.notes.append(f"{name}: {count(bad, 'line')} cut or damaged, and left out")
        return content.rows

    def _read_config(self) -> Row:
        path = self.path / "config.yaml"
        try:
            if path.exists() and yaml_source.OPEN not in yaml_source.read_text(path):
                return flat(yaml_source.read(path).data, "")
            if path.exists():  # references could reveal our variables; fedmpi writes none
                self.notes.append("config.yaml refers to environment variables, and is not read")
        except UserError as error:
            self.notes.append(str(error))
        return {}

    def _object(self, name: str) -> Row:
        """Return the object in a .json file; {} where there is none."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
            if isinstance(value, dict):
                return value
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            pass
        self.notes.append(f"{name} is damaged: no JSON object")
        return {}


def number(value: Any) -> float | None:
    """Return a value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(values: Any) -> list[float]:
    """Return the finite numbers in a list; [] for anything else."""
    return [v for each in values if (v := number(each)) is not None] if isinstance(values, list) else []


def curve(rows: Iterable[Row], *keys: str) -> Curve:
    """Return round -> the number at `keys` of each row, one within the other; of a list of numbers their mean.

    >>> curve([{"round": 3, "drift": {"norms": [1.0, 2.0]}}, {"round": 4}], "drift", "norms")
    {3: 1.5}
    """
    points = {}
    for row in rows:
        value: Any = row
        for key in keys:
            if isinstance(value, list) and key.isdigit():
                value = dict(enumerate(value)).get(int(key))
            else:
                value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, list):
            value = fmean(known) if (known := numbers(value)) else None
        if (v := number(value)) is not None:
            points[row["round"]] = v
    return points


def thinned(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly chosen from the first on."""
    return list(items)[:: max(-(-len(items) // most), 1)]


def base_name(value: Any) -> str:
    """Return the name in a setting, for a plug-in without the folders of its file.

    >>> base_name("/home/me/mine.py:Mine"), base_name("fedavg")
    ('mine.py:Mine', 'fedavg')
    """
    return "" if value is None else str(value).rpartition("/")[2]
