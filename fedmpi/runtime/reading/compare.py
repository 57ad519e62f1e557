"""How two runs differ: what they were made with, and from which round on what came out.

Results are what `metrics.jsonl` and `clients.jsonl` say of each round, but for seconds, and bytes, which depend on the
ranks; and the final model. Two runs have the same results where all of that is the same, in as many rounds. What they
were made with (settings, code, data, versions, machine) is told, and decides nothing.
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
NAMES = ("name", "output_mode", "timeline", "report")  # settings that change nothing of a run
DATA = ("partition", "training data", "test data", "layout", "initial weights")  # as digests are called
GROUPS = ("settings", "data", "code", "versions", "machine")
MOST, LONG = 20, 400  # differences of a group that are shown; letters of a value
Facts = dict[str, Any]
Pair = list[Any]  # what A has, what B has; None: nothing


def compare(a: Path, b: Path) -> Facts:
    """Compare two run directories. Raises UserError for what is no run or cannot be read.

    Returns:
        settings, code, data, versions, machine   what differs, name -> [a, b]
        rounds       [a, b]
        hash, figure, client   the first round in which the model's hash, a figure or a client's line differs, with what
            and [a, b]; None where none does
        models_same  how many rounds both have, if the hash is the same in all of them, else 0
        model        [a, b], digests of the final models where they differ
        same         whether the results are the same
    """
    sides = [_Side(each) for each in (a, b)]
    left, right = sides
    shared = sorted(left.rounds.keys() & right.rounds.keys())
    facts: Facts = {"a": str(a), "b": str(b), **_made_with(left, right)}
    facts["rounds"] = [len(left.rounds), len(right.rounds)]
    pairs = [(t, left.rounds[t], right.rounds[t]) for t in shared]
    hashes = {t: [x[HASH], y[HASH]] for t, x, y in pairs if None not in (x.get(HASH), y.get(HASH))}
    parted = [t for t, (x, y) in hashes.items() if x != y]
    facts["hash"] = {"round": parted[0], "values": hashes[parted[0]]} if parted else None
    facts["figure"] = next(({"round": t, **differs} for t, x, y in pairs if (differs := _figure(x, y))), None)
    facts["client"] = _clients(left.clients, right.clients, set(shared))
    facts["models_same"] = len(shared) if len(hashes) == len(shared) and not facts["hash"] else 0
    models = [side.model() for side in sides]
    both = None not in models
    facts["model"] = models if both and models[0] != models[1] else None
    parts = [facts[each] for each in ("hash", "figure", "client", "model")]
    facts["same"] = parts == [None] * 4 and left.rounds.keys() == right.rounds.keys()
    return facts


class _Side:
    """One run directory, read."""

    def __init__(self, run: Path) -> None:
        if not files.is_run(files.folder(run)):
            raise files.no_run(run, " or ".join(files.OF_A_RUN))
        self.run = run
        self.identity = comparable(files.json_of(run / "identity.json") or {})
        self.environment = files.json_of(run / "environment.json") or {}
        self.rounds = {row["round"]: row for row in _rows(run / "metrics.jsonl")}
        self.clients = keyed_rows(_rows(run / "clients.jsonl"))

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
    """Read rows strictly: a line that cannot be read must not count as a difference."""
    return read_jsonl(path, rounds=True, strict=True).rows


def _made_with(a: _Side, b: _Side) -> Facts:
    """settings, code, data: of identity.json; versions, machine: of environment.json."""
    changes = _changed(a.identity, b.identity)
    facts: Facts = {"settings": {k: v for k, v in changes.items() if not k.startswith("(") and k not in NAMES}}
    digests = {k.strip("()"): v for k, v in changes.items() if k.startswith("(")}
    is_data = {name: any(name.endswith(each) for each in DATA) for name in digests}
    facts["code"] = {k: v for k, v in digests.items() if not is_data[k]}
    facts["data"] = {k: v for k, v in digests.items() if is_data[k]}
    facts["versions"] = _changed(*(_versions(side.environment) for side in (a, b)))
    facts["machine"] = _changed(*(_machine(side.environment) for side in (a, b)))
    return facts


def _versions(about: Mapping[str, Any]) -> Facts:
    packages, git = about.get("packages"), about.get("git")
    versions = dict(packages) if isinstance(packages, dict) else {}
    if isinstance(git, dict):
        versions["commit"] = f"{str(git.get('commit'))[:12]}{' with changes' if git.get('modified') else ''}"
    return versions | {name: about.get(name) for name in ("python", "cuda", "mpi")}


def _machine(about: Mapping[str, Any]) -> Facts:
    ranks = [each for each in about.get("ranks") or () if isinstance(each, dict)]
    devices, hosts = (sorted({str(each.get(what)) for each in ranks}) for what in ("device", "host"))
    named = {name: about.get(name) for name in ("platform", "launcher", "backend", "threads")}
    return {**named, "ranks": len(ranks), "devices": ", ".join(devices), "hosts": ", ".join(hosts)}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {k: [a.get(k), b.get(k)] for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)}


def keyed_rows(rows: Iterable[Facts]) -> dict[tuple[Any, ...], Facts]:
    """Return (round, client, protocol) -> row; client and protocol are None in rows without them.

    The key of a second row with the same three is longer.
    """
    keyed: dict[tuple[Any, ...], Facts] = {}
    for row in rows:
        key: tuple[Any, ...] = (row["round"], row.get("client"), row.get("protocol"))
        while key in keyed:
            key = (*key, "again")
        keyed[key] = row
    return keyed


def _figure(a: Facts, b: Facts) -> Facts | None:
    differences = [each for each in row_differences(a, b) if each.key != HASH]
    if not differences:
        return None
    values = [None if value is MISSING else value for value in differences[0][1:]]
    return {"name": differences[0].key, "values": values, "others": [each.key for each in differences[1:]]}


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
    keys = [key for key in dict.fromkeys([*a, *b]) if key not in left_out and not (partial and key not in b)]
    pairs = [Difference(key, a.get(key, MISSING), b.get(key, MISSING)) for key in keys]
    return [each for each in pairs if not _same(each.a, each.b, tolerance)]


def _same(a: Any, b: Any, tolerance: float | None) -> bool:
    if tolerance is None or type(a) is bool or type(b) is bool:
        return bool(a == b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    return bool(a == b)


def _clients(a: Mapping[tuple[Any, ...], Facts], b: Mapping[tuple[Any, ...], Facts], shared: set[int]) -> Facts | None:
    """The first line of a client that differs, in rounds that both have."""
    keys = [key for key in dict.fromkeys([*a, *b]) if key[0] in shared and a.get(key) != b.get(key)]
    if not keys:
        return None
    first = min(keys, key=lambda key: (key[0], str(key[2]), key[1] if isinstance(key[1], int) else -1))
    lines = [side.get(first) for side in (a, b)]
    if None in lines:
        is_there = [each is not None for each in lines]
        return {"round": first[0], "client": first[1], "name": "its line", "values": is_there}
    return {"round": first[0], "client": first[1], **(_figure(*lines) or {})}  # type: ignore[arg-type]


def sweeps(a: Path, b: Path) -> Facts:
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


# ---- what is shown ----
def lines(facts: Facts, width: int) -> list[str]:
    """Return the output of `fedmpi compare`: the results first, then settings, data, code, versions and machines.

    Values stand side by side where they fit.
    """
    shown = _sweep_lines(facts, width) if "runs" in facts else _run_lines(facts, width)
    return [f"A  {facts['a']}", f"B  {facts['b']}", *shown]


def verdict(facts: Facts) -> str:
    """Say in one line whether the results are the same, or where they begin to differ."""
    many = facts["rounds"]
    if facts["same"]:
        return f"the same results in all {count(many[0], 'round')}"
    if facts["hash"]:
        return f"the models part in round {facts['hash']['round']}"
    if facts["figure"]:
        return f"{facts['figure']['name']} differs from round {facts['figure']['round']} on"
    if facts["client"]:
        return f"client {facts['client']['client']} differs from round {facts['client']['round']} on"
    if facts["model"]:
        return "the final models differ, and no round does"
    return f"the same results as far as both go: A has {count(many[0], 'round')}, B {many[1]}"


def _run_lines(facts: Facts, width: int) -> list[str]:
    shown = [verdict(facts)]
    if facts["rounds"][0] != facts["rounds"][1] and not shown[0].startswith("the same"):
        shown.insert(0, f"rounds: A has {facts['rounds'][0]}, B {facts['rounds'][1]}")
    if facts["models_same"] and not facts["same"]:
        shown += [f"  the models have the same SHA-256 in all {count(facts['models_same'], 'round')} that both have"]
    if facts["hash"]:
        shown += _values("  sha256", [value[:12] for value in facts["hash"]["values"]], width)
    if facts["figure"]:
        one = facts["figure"]
        shown += _values(f"  {one['name']}, round {one['round']}", one["values"], width)
        shown += [shorten(f"  and in that round {', '.join(one['others'])}", width)] if one["others"] else []
    if facts["client"] and "name" in facts["client"]:
        one = facts["client"]
        shown += _values(f"  client {one['client']}, {one['name']}, round {one['round']}", one["values"], width)
    if facts["model"] and not facts["hash"]:
        shown += _values("  model.safetensors", [value[:12] for value in facts["model"]], width)
    alike = [group for group in GROUPS if not facts[group]]
    for group in GROUPS:
        rows = list(facts[group].items())
        shown += [f"{group}: {count(len(rows), 'difference')}"] if rows else []
        for name, values in rows[:MOST]:
            shown += _values(f"  {name}", values, width)
        shown += [f"  and {len(rows) - MOST} more (--json shows all)"] if len(rows) > MOST else []
    return [*shown, *([f"the same: {', '.join(alike)}"] if alike else [])]


def _values(name: str, values: list[Any], width: int) -> list[str]:
    a, b = ("-" if value is None else shorten(str(value), LONG) for value in values)
    line = f"{name}: {a} | {b}"
    return [line] if len(line) <= width else [f"{name}:", f"    A  {a}", f"    B  {b}"]


def _sweep_lines(facts: Facts, width: int) -> list[str]:
    shown = list[str]()
    parted = {name: run for name, run in facts["runs"].items() if not run["same"]}
    for name, run in parted.items():
        shown += [f"{name}: {verdict(run)}"]
        changed = [key for group in GROUPS[:3] for key in run[group]]
        shown += [shorten(f"  differ: {', '.join(changed)}", width)] if changed else []
    for side, names in zip("AB", facts["only"], strict=True):
        shown += [f"only in {side}: {', '.join(names)}"] if names else []
    alike = len(facts["runs"]) - len(parted)
    return [*shown, f"{alike} of {count(len(facts['runs']), 'run')} that both have with the same results"]
