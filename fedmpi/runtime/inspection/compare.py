"""Compare settings, data, code and machine of two runs, and find the first round in which their results differ.

Results are the final model, and the rows of `metrics.jsonl` and `clients.jsonl` without values that depend on the
ranks, such as times and bytes. `fedmpi verify` and `fedmpi replay` use the same functions to compare a run with its
replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.metrics_row import VARIES_WITH_RANKS
from fedmpi.common.text import pluralize, shorten
from fedmpi.config import Settings
from fedmpi.config.resume_rules import normalize_identity
from fedmpi.runtime.inspection import run_files

MISSING = object()
WEIGHTS_HASH, MODEL = "sha256", "model.safetensors"
IRRELEVANT_SETTINGS = ("name", "trace", "report")  # settings without influence on results
# Names of digests of data in identity.json end with one of these.
DATA_DIGESTS = (
    *("partition", "training data", "test data", "tokenizer", "layout", "initial weights"),
    *("model.pretrained", "model.name"),  # files with pretrained weights, and those of hf:FOLDER
)
GROUPS = ("settings", "data", "code", "environment")
# Keys of environment.json that are not compared. The entries of ranks and packages are compared instead.
IGNORED_ENVIRONMENT = ("started", "command", "directory", "slurm_job_id", "ranks", "packages")
MAX_VALUE_LENGTH = 200  # largest number of characters of a value that are printed
CODE_DIGESTS, PARTITION = ("(code of fedmpi)", "(torch version)"), "(partition)"  # keys of identity.json
TRAINING, TEST = "(training data)", "(test data)"
Facts = dict[str, Any]
RowKey = tuple[Any, ...]


class RunRecord:
    """The records of a run: identity, environment and rows, read from its directory.

    Raises UserError if `run` is not a run directory, or if `strict` is true and a line of a file cannot be read.
    """

    def __init__(self, run: Path, strict: bool = True) -> None:
        if not run_files.is_run_dir(run_files.check_directory(run)):
            raise run_files.not_a_run_error(run, " or ".join(run_files.RUN_FILES))
        self.run, self.strict = run, strict
        identity = run_files.read_json_object(run / "identity.json") or {}
        run_files.check_written_by_this_version(run, identity)
        self.identity = normalize_identity(identity)
        about = run_files.read_json_object(run / "environment.json") or {}
        ranks = about.get("ranks") or []
        devices, hosts = (", ".join(sorted({str(each.get(what)) for each in ranks})) for what in ("device", "host"))
        self.environment = {key: value for key, value in about.items() if key not in IGNORED_ENVIRONMENT}
        self.environment |= about.get("packages") or {}
        self.environment |= {"number of ranks": len(ranks), "devices": devices, "hosts": hosts}
        self.rounds = {row["round"]: row for row in self.read_rows("metrics.jsonl").values()}

    def read_rows(self, name: str) -> dict[RowKey, Facts]:
        """Return the rows of a .jsonl file, keyed by (round, client, protocol).

        If several rows have the same key, "again" is appended to the keys of later ones.
        """
        keyed: dict[RowKey, Facts] = {}
        for row in read_jsonl(self.run / name, need_round=True, strict=self.strict).rows:
            key: RowKey = (row["round"], row.get("client"), row.get("protocol"))
            while key in keyed:
                key = (*key, "again")
            keyed[key] = row
        return keyed

    def file_digest(self, name: str) -> str | None:
        """Return the SHA-256 of a file of the run directory; None if the file is missing."""
        path = self.run / name
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


class Difference(NamedTuple):
    """A key that has different values `a` and `b` in the same row of two runs; a missing key has the value MISSING."""

    key: str
    a: Any
    b: Any


def find_differing_rows(
    a: RunRecord, b: RunRecord, name: str, tolerance: float | None = None, partial: int | None = None
) -> Iterator[tuple[RowKey, list[Difference]]]:
    """Yield the key and the differences of each row in which two runs differ.

    Values that depend on the ranks, such as times, are not compared.

    Args:
        a, b: the records of the two runs.
        name: the file, such as metrics.jsonl.
        tolerance: maximum difference between numbers, relative to the larger number if that is above 1; hashes are
            not compared. None: values and hashes must be equal.
        partial: a round that run b has not evaluated. In this round, only the keys that b has recorded are compared.
    """
    left, right = a.read_rows(name), b.read_rows(name)
    left_out = {*VARIES_WITH_RANKS, *((WEIGHTS_HASH,) if tolerance is not None else ())}
    for key in sorted({**left, **right}, key=lambda key: (key[0], str(key[1:]))):
        x, y = left.get(key, {}), right.get(key, {})
        names = [each for each in {**x, **y} if each not in left_out and (key[0] != partial or each in y)]
        pairs = [Difference(each, x.get(each, MISSING), y.get(each, MISSING)) for each in names]
        if differences := [pair for pair in pairs if not _are_equal(pair.a, pair.b, tolerance)]:
            yield key, differences


def _are_equal(a: Any, b: Any, tolerance: float | None) -> bool:
    if tolerance is not None and bool not in (type(a), type(b)):
        if isinstance(a, int | float) and isinstance(b, int | float):
            return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(_are_equal(x, y, tolerance) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(_are_equal(a[key], b[key], tolerance) for key in a)
    return bool(a == b)


def find_setup_differences(a: RunRecord, b: RunRecord) -> Facts:
    """Return how two runs differ in settings, code, data and environment: for each, a dict from name to both values."""
    changes = _find_changes(a.identity, b.identity)
    digests = {key.strip("()"): pair for key, pair in changes.items() if key.startswith("(")}
    data = {key: pair for key, pair in digests.items() if key.endswith(DATA_DIGESTS)}
    return {
        "settings": {
            key: pair for key, pair in changes.items() if not key.startswith("(") and key not in IRRELEVANT_SETTINGS
        },
        "code": {key: pair for key, pair in digests.items() if key not in data},
        "data": data,
        "environment": _find_changes(a.environment, b.environment),
    }


def _find_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in {**a, **b} if a.get(key) != b.get(key)}


# ---- the command ----
def compare_runs(a: Path, b: Path) -> Facts:
    """Compare two run directories. Raises UserError if one is not a run directory or cannot be read.

    Returns:
        A dict with the keys
        a, b: the directories.
        settings, code, data, environment: differences, as name -> [value in a, value in b].
        rounds: [number of rounds in a, number of rounds in b].
        hash, metric, client: the first round in which the model's hash, a metric, or a client's row differs, with the
            name and both values of the first difference; None if there is no difference.
        model: SHA-256 of both final models; None if they are equal or one is missing.
        same: whether the results are the same.
    """
    left, right = RunRecord(a), RunRecord(b)
    shared = left.rounds.keys() & right.rounds.keys()
    rows, of_clients = (
        [(key, each) for key, each in find_differing_rows(left, right, name) if key[0] in shared]
        for name in ("metrics.jsonl", "clients.jsonl")
    )
    facts: Facts = {"a": str(a), "b": str(b), **find_setup_differences(left, right)}
    facts["rounds"] = [len(left.rounds), len(right.rounds)]
    facts["hash"] = _describe_first_difference(
        (key, [each for each in row if each.key == WEIGHTS_HASH]) for key, row in rows
    )
    facts["metric"] = _describe_first_difference(
        (key, [each for each in row if each.key != WEIGHTS_HASH]) for key, row in rows
    )
    facts["client"] = _describe_first_difference(of_clients)
    models = [record.file_digest(MODEL) for record in (left, right)]
    facts["model"] = models if None not in models and models[0] != models[1] else None
    parts = [facts[each] for each in ("hash", "metric", "client", "model")]
    facts["same"] = parts == [None] * 4 and left.rounds.keys() == right.rounds.keys()
    return facts


def _describe_first_difference(rows: Iterable[tuple[RowKey, list[Difference]]]) -> Facts | None:
    """Describe the first row with differences: round, client, first key with both values, and names of other keys."""
    for (t, client, *_), (first, *others) in ((key, each) for key, each in rows if each):
        values = [None if value is MISSING else value for value in (first.a, first.b)]
        names = [each.key for each in others]
        return {"round": t, "client": client, "name": first.key, "values": values, "others": names}
    return None


def format_comparison(facts: Facts) -> list[str]:
    """Return the lines that `fedmpi compare` prints: results, then settings, data, code and environment."""
    shown = [f"A  {facts['a']}", f"B  {facts['b']}", format_verdict(facts)]
    for one in (facts[key] for key in ("hash", "metric", "client") if facts[key]):
        who = f"client {one['client']}, " if one["client"] is not None else ""
        shown += [_format_pair(f"{who}{one['name']}, round {one['round']}", one["values"])]
        shown += [f"  also: {shorten(', '.join(one['others']), MAX_VALUE_LENGTH)}"] if one["others"] else []
    shown += [_format_pair(MODEL, facts["model"])] if facts["model"] else []
    for group in GROUPS:
        shown += [f"{group}: {pluralize(len(facts[group]), 'difference')}"] if facts[group] else []
        shown += [_format_pair(name, values) for name, values in facts[group].items()]
    return [*shown, f"no differences in: {', '.join(group for group in GROUPS if not facts[group]) or '-'}"]


def format_verdict(facts: Facts) -> str:
    """Return a line that states that the results are the same, or from which round on they differ."""
    a, b = facts["rounds"]
    end = f" (A has {pluralize(a, 'round')}, B {pluralize(b, 'round')})" if a != b else ""
    if one := facts["hash"]:
        return f"the models differ from round {one['round']} on{end}"
    if one := facts["metric"]:
        return f"the same models; {one['name']} differs from round {one['round']} on{end}"
    if one := facts["client"]:
        return f"client {one['client']} differs from round {one['round']} on{end}"
    if facts["model"]:
        return f"the final models differ, but no round does{end}"
    same = "the same results in all"
    return f"{same} rounds that both have{end}" if end else f"{same} {pluralize(a, 'round')}"


def _format_pair(name: str, values: list[Any]) -> str:
    a, b = ("-" if value is None else shorten(str(value), MAX_VALUE_LENGTH) for value in values)
    return f"  {name}: {a} | {b}"


# ---- comparability of runs that are combined in a table cell or in a curve of a report ----
def select_seed_independent_digests(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of identity.json that do not depend on the seed.

    The digest of the partition is included only if the partition is read from a file. Digests of the data are left out
    if the data source is a plug-in, because its data may depend on the seed.

    >>> identity = {"(partition)": "a", "(training data)": "b"}
    >>> [list(select_seed_independent_digests(identity | {"data.partition.scheme": repr(s)})) for s in ("iid", "file")]
    [['(training data)'], ['(partition)', '(training data)']]
    """
    scheme = identity.get("data.partition.scheme")
    drawn = set() if scheme == "'file'" else {PARTITION}
    drawn |= {TRAINING, TEST} if ":" in str(identity.get("data.source")) else set()
    shared = {PARTITION, TRAINING, TEST, "(tokenizer)", "(initial weights)"} - drawn
    return {key: str(value) for key, value in identity.items() if key in shared or key.startswith("(plug-in ")}


def find_digest_differences(runs: Iterable[tuple[Settings, Mapping[str, Any]]]) -> dict[str, tuple[str, str]]:
    """Find digests that differ between runs although they should be equal; return each with the names of two such runs.

    Digests of code should be equal in all runs, digests of data in runs with equal data settings, and all other digests
    in runs with equal settings. If a digest depends on the seed, only runs with the same seed are compared.
    """
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    differing: dict[str, tuple[str, str]] = {}
    for settings, identity in runs:
        same_for_seeds = select_seed_independent_digests(identity)
        for item in (
            key for key in identity if key in same_for_seeds or key in (*CODE_DIGESTS, PARTITION, TRAINING, TEST)
        ):
            section = "data." if item in (PARTITION, TRAINING, TEST) else ""
            left_out = (*IRRELEVANT_SETTINGS, "seed", "(") if item in same_for_seeds else (*IRRELEVANT_SETTINGS, "(")
            keys = [key for key in identity if key.startswith((section, "seed")) and not key.startswith(left_out)]
            depends_on = (
                [] if item in CODE_DIGESTS else [str(settings.data.root), *(f"{key}: {identity[key]}" for key in keys)]
            )
            name, digest = first.setdefault((item, *depends_on), (settings.name, identity[item]))
            if digest != identity[item]:
                differing.setdefault(item, (name, settings.name))
    return differing
