"""A run once more, without its faults but with what they meant for the numbers: the same bits in every round."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.signals import CommandProcess
from fedmpi.common.text import count
from fedmpi.runtime import trust

if TYPE_CHECKING:
    from fedmpi.config import Settings


def run(directory: Path, settings: Settings, trusted: bool, say: Callable[[str], None], process: CommandProcess) -> int:
    """Replay the rounds that the run has and compare; the exit code: 0 where all have the same bits, 1 where not."""
    from fedmpi.runtime.run import execute

    process.stop.after = len(_hashes(directory / "metrics.jsonl"))
    with trust.guard(trusted):
        result, code = execute(settings, process)
    if "directory" not in result or (code and not process.stop.enough):  # the other ranks have nothing to compare
        return code
    said, same = compare(directory, Path(result["directory"]))
    say(said)
    return 0 if same else 1


def settings(
    directory: Path, trusted: bool, overrides: Sequence[str] = (), place: Sequence[str] | None = None
) -> Settings:
    """Those of the run in `directory`, to be run with its faults.jsonl and placement.jsonl, from the weights that it
    started from. place: settings that say where; without them beside it, as NAME-replay.

    Raises UserError as `trust.run_settings` does.
    """
    given = ["faults.on_lost_rank=abort", "checkpoint.resume=never"]
    files = {"faults.replay": "faults.jsonl", "cohort.replay": "placement.jsonl", "init.from": "initial.safetensors"}
    for key, file in files.items():
        path = directory / file
        given.append(f"{key}={json.dumps(str(path)) if path.exists() else 'null'}")
    beside = [f"output={json.dumps(str(directory.parent))}", f"name={json.dumps(f'{directory.name}-replay')}"]
    place = beside if place is None else place
    return trust.run_settings(directory, trusted, [*overrides, *given, *place])


def compare(directory: Path, again: Path) -> tuple[str, bool]:
    """A line on the rounds of the run and of its replay, and whether all of them have the same bits."""
    before, now = (_hashes(path / "metrics.jsonl") for path in (directory, again))
    different = [t for t in sorted(before) if before[t] != now.get(t)]
    if not different:
        return f"{count(len(before), 'round')} of {directory}: the same bits in {again}", True
    t = different[0]
    said = f"{len(different)} of {count(len(before), 'round')} differ, round {t} first: {directory} has "
    return f"{said}{before[t][:12]}, {again} {now.get(t, 'no such round')[:13]}", False


def _hashes(path: Path) -> dict[int, str]:
    """round -> sha256 of the global model after it."""
    if not path.exists():
        raise UserError(f"{path} is missing: no round of this run was written")
    rows = read_jsonl(path, rounds=True, strict=True).rows
    if not rows:
        raise UserError(f"{path} is empty: no round of this run was written")
    try:
        return {row["round"]: str(row["sha256"]) for row in rows}
    except KeyError as error:
        raise UserError(f"{path}: a row has no {error} of the model after it") from error
