"""A run once more, without its faults but with what they meant for the numbers: the same bits in every round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.runtime import trust

if TYPE_CHECKING:
    from fedmpi.config import Settings


def settings(directory: Path, trusted: bool) -> Settings:
    """Those of the run in `directory`, to be run beside it (NAME-replay) with its faults.jsonl, if it has one.

    Raises UserError as `trust.run_settings` does.
    """
    faults = directory / "faults.jsonl"
    given = ["faults.on_lost_rank=abort", "checkpoint.resume=never", "faults.replay=null"]
    if faults.exists():
        given[-1] = f"faults.replay={json.dumps(str(faults))}"
    place = [f"output={json.dumps(str(directory.parent))}", f"name={json.dumps(f'{directory.name}-replay')}"]
    return trust.run_settings(directory, trusted, [*given, *place])


def compare(directory: Path, again: Path) -> tuple[str, bool]:
    """A line on the rounds of the run and of its replay, and whether all of them have the same bits."""
    before, now = (_hashes(path / "metrics.jsonl") for path in (directory, again))
    different = [t for t in sorted(before) if before[t] != now.get(t)]
    if not different:
        return f"{count(len(before), 'round')} of {directory}: the same bits in {again}", True
    t = different[0]
    said = f"{different and len(different)} of {count(len(before), 'round')} differ from round {t} on: {directory} has "
    return f"{said}{before[t][:12]}, {again} {now.get(t, 'no such round')[:12]}", False


def _hashes(path: Path) -> dict[int, str]:
    """round -> sha256 of the global model after it."""
    if not path.exists():
        raise UserError(f"{path} is missing: no round of this run was written")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["round"]: row["sha256"] for row in rows}
