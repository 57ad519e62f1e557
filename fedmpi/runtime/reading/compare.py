"""How two runs differ: what they were made with, and from which round on what came out.

Results are what `metrics.jsonl` and `clients.jsonl` say of each round, but for seconds, and bytes, which depend on the
ranks; and the final model. Two runs have the same results where all of that is the same, in as many rounds. What they
were made with (settings, code, data, versions, machine) is told, and decides nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.metrics_row import VARIES_WITH_RANKS
from fedmpi.config.later import comparable
from fedmpi.runtime.reading import files

HASH, MODEL = "sha256", "model.safetensors"
NAMES = ("name", "output_mode", "timeline", "report")  # settings that change nothing of a run
DATA = ("partition", "training data", "test data", "layout", "initial weights")  # as digests are called
Facts = dict[str, Any]
Pair = list[Any]  # what A has, what B has; None: nothing


def compare(a: Path, b: Path) -> Facts:
    """Two run directories. settings, code, data, versions, machine: what differs, name -> [a, b]; rounds: [a, b];
    hash, figure, client: the first round in which the model's hash, a figure, a client's line differs (with what and
    [a, b]), None where none does; models_same: how many rounds both have, if the hash is the same in all of them, else
    0; model: [a, b] digests of the final model where they differ; same: whether the results do not. Raises UserError
    for what is no run or cannot be read.
    """
    sides = [_Side(each) for each in (a, b)]
    left, right = sides
    shared = sorted(left.rounds.keys() & right.rounds.keys())
    found: Facts = {"a": str(a), "b": str(b), **_made_with(left, right)}
    found["rounds"] = [len(left.rounds), len(right.rounds)]
    found["hash"] = _first(shared, lambda t: _hash(left.rounds[t], right.rounds[t]))
    found["figure"] = _first(shared, lambda t: _figure(left.rounds[t], right.rounds[t]))
    found["client"] = _clients(left.clients, right.clients, set(shared))
    compared = [t for t in shared if None not in (left.rounds[t].get(HASH), right.rounds[t].get(HASH))]
    found["models_same"] = len(shared) if compared == shared and not found["hash"] else 0
    models = [side.model() for side in sides]
    both = None not in models
    found["model"] = models if both and models[0] != models[1] else None
    parts = [found[each] for each in ("hash", "figure", "client", "model")]
    found["same"] = parts == [None] * 4 and left.rounds.keys() == right.rounds.keys()
    return found


class _Side:
    """One run directory, read."""

    def __init__(self, run: Path) -> None:
        if not files.is_run(files.folder(run)):
            raise files.no_run(run, " or ".join(files.OF_A_RUN))
        self.run = run
        self.identity = comparable(files.json_of(run / "identity.json") or {})
        self.environment = files.json_of(run / "environment.json") or {}
        self.rounds = {row["round"]: row for row in _rows(run / "metrics.jsonl")}
        rows = _rows(run / "clients.jsonl")
        self.clients = {(row["round"], row.get("client"), row.get("protocol")): row for row in rows}

    def model(self) -> str | None:
        digest = hashlib.sha256()
        try:
            with (self.run / MODEL).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except OSError:
            return None
        return digest.hexdigest()


def _rows(path: Path) -> list[Facts]:
    """Every line counts: one that cannot be read is no difference, and must not pass for one."""
    return read_jsonl(path, rounds=True, strict=True).rows


def _made_with(a: _Side, b: _Side) -> Facts:
    """settings, code, data: of identity.json; versions, machine: of environment.json."""
    told = _differences(a.identity, b.identity)
    found: Facts = {"settings": {k: v for k, v in told.items() if not k.startswith("(") and k not in NAMES}}
    digests = {k.strip("()"): v for k, v in told.items() if k.startswith("(")}
    is_data = {name: any(name.endswith(each) for each in DATA) for name in digests}
    found["code"] = {k: v for k, v in digests.items() if not is_data[k]}
    found["data"] = {k: v for k, v in digests.items() if is_data[k]}
    found["versions"] = _differences(*(_versions(side.environment) for side in (a, b)))
    found["machine"] = _differences(*(_machine(side.environment) for side in (a, b)))
    return found


def _versions(about: Mapping[str, Any]) -> Facts:
    packages, git = about.get("packages"), about.get("git")
    found = dict(packages) if isinstance(packages, dict) else {}
    if isinstance(git, dict):
        found["commit"] = f"{str(git.get('commit'))[:12]}{' with changes' if git.get('modified') else ''}"
    return found | {name: about.get(name) for name in ("python", "cuda", "mpi")}


def _machine(about: Mapping[str, Any]) -> Facts:
    ranks = [each for each in about.get("ranks") or () if isinstance(each, dict)]
    devices, hosts = (sorted({str(each.get(what)) for each in ranks}) for what in ("device", "host"))
    named = {name: about.get(name) for name in ("platform", "launcher", "backend", "threads")}
    return {**named, "ranks": len(ranks), "devices": ", ".join(devices), "hosts": ", ".join(hosts)}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {k: [a.get(k), b.get(k)] for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)}


def _first(rounds: Iterable[int], differ: Callable[[int], Facts | None]) -> Facts | None:
    """The first round in which there is a difference, with it."""
    return next(({"round": t, **found} for t in rounds if (found := differ(t)) is not None), None)


def _hash(a: Facts, b: Facts) -> Facts | None:
    """Of the model after a round; a round whose line was written before its hash was known has none."""
    values = [row.get(HASH) for row in (a, b)]
    return {"values": values} if None not in values and values[0] != values[1] else None


def _figure(a: Facts, b: Facts) -> Facts | None:
    names = [name for name in dict.fromkeys([*a, *b]) if name not in (*VARIES_WITH_RANKS, HASH)]
    differing = [name for name in names if a.get(name) != b.get(name)]
    if not differing:
        return None
    name = differing[0]
    return {"name": name, "values": [a.get(name), b.get(name)], "others": differing[1:]}


def _clients(a: Mapping[tuple[Any, ...], Facts], b: Mapping[tuple[Any, ...], Facts], shared: set[int]) -> Facts | None:
    """The first line of a client that differs, in rounds that both have."""
    keys = [key for key in dict.fromkeys([*a, *b]) if key[0] in shared and a.get(key) != b.get(key)]
    if not keys:
        return None
    first = min(keys, key=lambda key: (key[0], str(key[2]), key[1] if isinstance(key[1], int) else -1))
    lines = [side.get(first) for side in (a, b)]
    if None in lines:
        return {
            "round": first[0],
            "client": first[1],
            "name": "its line",
            "values": [each is not None for each in lines],
        }
    return {"round": first[0], "client": first[1], **(_figure(*lines) or {})}  # type: ignore[arg-type]


def sweeps(a: Path, b: Path) -> Facts:
    """Two directories of runs, by the runs' names. only: names that one side alone has; same: all are, on both."""
    names = [{run.name for run in files.runs_in(each)} for each in (a, b)]
    both = sorted(names[0] & names[1])
    if not both:
        raise UserError(f"{a} and {b} have no run of one name; give two runs, or two directories of a sweep's runs")
    runs = {name: compare(a / name, b / name) for name in both}
    only = [sorted(names[0] - names[1]), sorted(names[1] - names[0])]
    same = not any(only) and all(run["same"] for run in runs.values())
    return {"a": str(a), "b": str(b), "runs": runs, "only": only, "same": same}
