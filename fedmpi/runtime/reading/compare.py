"""How two runs differ: what they were made with, and from which round on their results do.

Results are what `metrics.jsonl` and `clients.jsonl` say of each round, but for seconds, and bytes, which depend on the
ranks; and the final model. `fedmpi verify` and `replay` compare a run with its replay by the same functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.metrics_row import VARIES_WITH_RANKS
from fedmpi.common.text import count, shorten
from fedmpi.config.resume_rules import comparable
from fedmpi.runtime.reading import files

MISSING = object()
HASH, MODEL = "sha256", "model.safetensors"
NAMES = ("name", "timeline", "report")  # settings that change nothing of a run
DATA = ("partition", "training data", "test data", "layout", "initial weights")  # as digests are called
GROUPS = ("settings", "data", "code", "environment")
NO_CAUSE = ("started", "command", "directory", "slurm_job_id", "ranks")  # of environment.json
LONG = 200  # letters of a value that are shown
Facts = dict[str, Any]
RowKey = tuple[Any, ...]


class RunRecord:
    """A run directory, read. Raises UserError for what is no run; `strict`: also for lines that cannot be read."""

    def __init__(self, run: Path, strict: bool = True) -> None:
        if not files.is_run(files.folder(run)):
            raise files.no_run(run, " or ".join(files.OF_A_RUN))
        self.run, self.strict = run, strict
        self.identity = comparable(files.json_of(run / "identity.json") or {})
        self.environment = files.json_of(run / "environment.json") or {}
        self.rounds = {row["round"]: row for row in self.rows("metrics.jsonl").values()}

    def rows(self, name: str) -> dict[RowKey, Facts]:
        """Return (round, client, protocol) -> row of a file; the key of a second row of these three is longer."""
        keyed: dict[RowKey, Facts] = {}
        for row in read_jsonl(self.run / name, rounds=True, strict=self.strict).rows:
            key: RowKey = (row["round"], row.get("client"), row.get("protocol"))
            while key in keyed:
                key = (*key, "again")
            keyed[key] = row
        return keyed

    def digest(self, name: str) -> str | None:
        """Return the SHA-256 of a file; None if there is none."""
        path = self.run / name
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def compare(a: Path, b: Path) -> Facts:
    """Compare two run directories. Raises UserError for what is no run or cannot be read.

    Returns:
        settings, code, data, environment   what differs, name -> [a, b]
        rounds       [a, b]
        hash, figure, client   the first round in which the model's hash, a metric or a client's line differs, with what
            and [a, b]; None where none does
        model        [a, b], digests of the final models where they differ
        same         whether the results are the same
    """
    left, right = RunRecord(a), RunRecord(b)
    shared = sorted(left.rounds.keys() & right.rounds.keys())
    pairs = [((t,), left.rounds[t], right.rounds[t]) for t in shared]
    hashes = (
        ({"round": t, "values": [x.get(HASH), y.get(HASH)]}) for (t,), x, y in pairs if x.get(HASH) != y.get(HASH)
    )
    facts: Facts = {"a": str(a), "b": str(b), **made_with(left, right)}
    facts["rounds"] = [len(left.rounds), len(right.rounds)]
    facts["hash"] = next(hashes, None)
    facts["figure"] = _first_difference(pairs)
    rows = left.rows("clients.jsonl"), right.rows("clients.jsonl")
    keys = sorted((key for key in {**rows[0], **rows[1]} if key[0] in shared), key=lambda key: (key[0], str(key[1:])))
    facts["client"] = _first_difference((key, rows[0].get(key, {}), rows[1].get(key, {})) for key in keys)
    models = [record.digest(MODEL) for record in (left, right)]
    facts["model"] = models if None not in models and models[0] != models[1] else None
    parts = [facts[each] for each in ("hash", "figure", "client", "model")]
    facts["same"] = parts == [None] * 4 and left.rounds.keys() == right.rounds.keys()
    return facts


def _first_difference(pairs: Iterable[tuple[RowKey, Facts, Facts]]) -> Facts | None:
    """Return round, client, and the first key that differs beside the hash with its values and the other keys."""
    for (t, *client), a, b in pairs:
        differences = [each for each in row_differences(a, b) if each.key != HASH]
        if differences:
            values = [None if value is MISSING else value for value in differences[0][1:]]
            who = {"client": client[0]} if client else {}
            others = [each.key for each in differences[1:]]
            return {"round": t, **who, "name": differences[0].key, "values": values, "others": others}
    return None


class Difference(NamedTuple):
    """A key of a row of which two runs have different values, or one has none (MISSING)."""

    key: str
    a: Any
    b: Any


def row_differences(a: Facts, b: Facts, tolerance: float | None = None, *, partial: bool = False) -> list[Difference]:
    """Return in what two rows of metrics.jsonl, or of a file like it, differ, but for what depends on the ranks.

    Args:
        tolerance: how far apart numbers may be, relative to the larger one where that is above 1; then hashes are not
            compared. None: not at all.
        partial: b was written before its round was evaluated; what it lacks does not count.
    """
    left_out = {*VARIES_WITH_RANKS, *((HASH,) if tolerance is not None else ())}
    keys = [key for key in {**a, **b} if key not in left_out and not (partial and key not in b)]
    pairs = [Difference(key, a.get(key, MISSING), b.get(key, MISSING)) for key in keys]
    return [each for each in pairs if not _is_same(each.a, each.b, tolerance)]


def _is_same(a: Any, b: Any, tolerance: float | None) -> bool:
    if tolerance is None or type(a) is bool or type(b) is bool:
        return bool(a == b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_is_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key], tolerance) for key in a)
    return bool(a == b)


def made_with(a: RunRecord, b: RunRecord) -> Facts:
    """Return what differs: settings, code and data by identity.json; versions and machine by environment.json."""
    changes = _changes(a.identity, b.identity)
    digests = {key.strip("()"): pair for key, pair in changes.items() if key.startswith("(")}
    data = {key: pair for key, pair in digests.items() if key.endswith(DATA)}
    return {
        "settings": {key: pair for key, pair in changes.items() if not key.startswith("(") and key not in NAMES},
        "code": {key: pair for key, pair in digests.items() if key not in data},
        "data": data,
        "environment": _changes(*(_environment(record.environment) for record in (a, b))),
    }


def _environment(about: Mapping[str, Any]) -> Facts:
    """Return versions and machine of environment.json, and of the ranks their number, devices and hosts."""
    facts = {key: value for key, value in about.items() if key not in NO_CAUSE}
    packages, ranks = facts.pop("packages", None) or {}, about.get("ranks") or []
    devices, hosts = (", ".join(sorted({str(each.get(what)) for each in ranks})) for what in ("device", "host"))
    return {**facts, **packages, "number of ranks": len(ranks), "devices": devices, "hosts": hosts}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in {**a, **b} if a.get(key) != b.get(key)}


def compare_sweeps(a: Path, b: Path) -> Facts:
    """Compare two directories of runs, by the runs' names.

    Returns runs: name -> as of `compare`; only: the names that one side alone has; same: whether all are the same.
    """
    names = [{run.name for run in files.runs_in(each)} for each in (a, b)]
    both = sorted(names[0] & names[1])
    if not both:
        raise UserError(f"{a} and {b} have no run of one name; give two runs, or two directories of a sweep's runs")
    runs = {name: compare(a / name, b / name) for name in both}
    only = [sorted(names[0] - names[1]), sorted(names[1] - names[0])]
    same = not any(only) and all(run["same"] for run in runs.values())
    return {"a": str(a), "b": str(b), "runs": runs, "only": only, "same": same}


# ---- output ----
def lines(facts: Facts) -> list[str]:
    """Return the output of `fedmpi compare`: the results first, then settings, data, code, versions and machines."""
    shown = [f"A  {facts['a']}", f"B  {facts['b']}"]
    if "runs" not in facts:
        return [*shown, *_run_lines(facts)]
    different = {name: run for name, run in facts["runs"].items() if not run["same"]}
    for name, run in different.items():
        changed = [key for group in GROUPS[:3] for key in run[group]]
        shown += [f"{name}: {verdict(run)}", *([f"  differ: {shorten(', '.join(changed), LONG)}"] if changed else [])]
    for side, names in zip("AB", facts["only"], strict=True):
        shown += [f"only in {side}: {', '.join(names)}"] if names else []
    alike = len(facts["runs"]) - len(different)
    return [*shown, f"{alike} of {count(len(facts['runs']), 'run')} that both have with the same results"]


def verdict(facts: Facts) -> str:
    """Say in one line whether the results are the same, or where they begin to differ."""
    a, b = facts["rounds"]
    end = f" (A has {count(a, 'round')}, B {count(b, 'round')})" if a != b else ""
    if facts["hash"]:
        return f"the models differ from round {facts['hash']['round']} on{end}"
    if facts["figure"]:
        return f"the same models; {facts['figure']['name']} differs from round {facts['figure']['round']} on{end}"
    if facts["client"]:
        return f"client {facts['client']['client']} differs from round {facts['client']['round']} on{end}"
    if facts["model"]:
        return f"the final models differ, and no round does{end}"
    return f"the same results as far as both go{end}" if end else f"the same results in all {count(a, 'round')}"


def _run_lines(facts: Facts) -> list[str]:
    shown = [verdict(facts)]
    for key in ("hash", "figure", "client"):
        if one := facts[key]:
            who = f"client {one['client']}, " if "client" in one else ""
            shown += [_pair(f"{who}{one.get('name', HASH)}, round {one['round']}", one["values"])]
            shown += [f"  and there {shorten(', '.join(one['others']), LONG)}"] if one.get("others") else []
    shown += [_pair(MODEL, facts["model"])] if facts["model"] else []
    for group in GROUPS:
        shown += [f"{group}: {count(len(facts[group]), 'difference')}"] if facts[group] else []
        shown += [_pair(name, values) for name, values in facts[group].items()]
    return [*shown, f"the same: {', '.join(group for group in GROUPS if not facts[group]) or 'nothing else'}"]


def _pair(name: str, values: list[Any]) -> str:
    a, b = ("-" if value is None else shorten(str(value), LONG) for value in values)
    return f"  {name}: {a} | {b}"
