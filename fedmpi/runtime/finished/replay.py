"""Rounds of a run once more: all of them without its faults (`fedmpi replay`), or some of them (`fedmpi verify`).

A replay has what the faults meant for the numbers, and so the same bits in every round.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.signals import CommandProcess
from fedmpi.common.text import count
from fedmpi.config.schema import Settings
from fedmpi.runtime import trust
from fedmpi.runtime.record.durable import CorruptFileError, read_tensors
from fedmpi.runtime.resuming import resume
from fedmpi.runtime.run import execute

RARELY = 1_000_000  # rounds between checkpoints of a replay
NEAR = 10  # rounds, that are trained for the sake of the last one


def replay(
    directory: Path, settings: Settings, trusted: bool, say: Callable[[str], None], process: CommandProcess
) -> int:
    """Replay the rounds that the run has and compare; the exit code: 0 where all have the same bits, 1 where not."""
    process.stop.max_rounds = len(_hashes(directory / "metrics.jsonl"))
    with trust.guard(trusted):
        result, code = execute(settings, process)
    if "directory" not in result or (code and not process.stop.rounds_done):  # the other ranks have nothing to compare
        return code
    said, same = compare(directory, Path(result["directory"]))
    say(said)
    return 0 if same else 1


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


# ---- some rounds, in a temporary directory: from a checkpoint where one is before them, else the start ----
@dataclass(frozen=True)
class Again:
    """A replay: its run directory, and whether it was stopped before it had evaluated its last round."""

    path: Path
    stopped: bool


def chosen(rounds: Sequence[int], number: int | None, also: Collection[int], kept: Sequence[int]) -> list[int]:
    """Which rounds to replay: so many at random (None: all), what is suspect, and the last one where a checkpoint is
    near."""
    if number is None or number >= len(rounds):
        return list(rounds)
    found = {*SystemRandom().sample(list(rounds), number), *(t for t in also if t in rounds)}
    near = any(0 < rounds[-1] - t <= NEAR for t in kept)
    return sorted(found | ({rounds[-1]} if near else set()))


def checkpoints(run: Path) -> list[int]:
    """The rounds of the checkpoints that are whole, ascending."""
    found = []
    for path in sorted(run.glob("checkpoints/[0-9]*.safetensors")):
        try:
            found.append(int(read_tensors(path)[1]["round"]))
        except (CorruptFileError, KeyError, TypeError):
            continue
    return found


def segments(wanted: Sequence[int], kept: Sequence[int]) -> list[tuple[int, int]]:
    """(checkpoint to begin after, -1: the start; last round), as few as serve all that is wanted.

    >>> segments([3, 11, 12, 19], [9, 18]), segments([3, 11], [])
    ([(-1, 3), (9, 12), (18, 19)], [(-1, 11)])
    """
    found: dict[int, int] = {}
    for t in wanted:
        start = max((c for c in kept if c < t), default=-1)
        found[start] = max(found.get(start, t), t)
    return sorted(found.items())


@contextmanager
def again(run: Path, trusted: bool, overrides: Sequence[str], start: int, last: int, total: int) -> Iterator[Again]:
    """Replay the rounds after checkpoint `start` to round `last`, of `total` that the run has.

    A round is evaluated while the next one is trained, so one more is trained where there is one. Raises
    KeyboardInterrupt where a signal came.
    """
    with tempfile.TemporaryDirectory(prefix="fedmpi-verify-") as place:
        settings = _settings(run, trusted, overrides, Path(place), start)
        if start >= 0:
            _begin(run, Path(place) / settings.name, start)
        process = CommandProcess()
        process.stop.max_rounds = min(last + 2, total)
        with trust.guard(trusted), redirect_stdout(io.StringIO()):
            result, _ = execute(settings, process)
        if process.stop.signal:
            raise KeyboardInterrupt
        yield Again(Path(result["directory"]), result["exit_reason"] == "stopped")


def _settings(run: Path, trusted: bool, overrides: Sequence[str], place: Path, start: int) -> Settings:
    given = [
        f"output={json.dumps(str(place))}",
        "name=again",
        "timeline=false",
        "report=false",
        f"checkpoint.every={RARELY}",
    ]
    given += ["checkpoint.resume=must", "checkpoint.changes=accept"] if start >= 0 else []
    return trust.replay_settings(run, trusted, overrides, given)


def _begin(run: Path, here: Path, start: int) -> None:
    """A run directory that a job would go on with after this checkpoint; of the files links are enough."""
    (here / "checkpoints").mkdir(parents=True)
    (here / resume.IDENTITY).write_bytes((run / resume.IDENTITY).read_bytes())
    files = [run / "checkpoints" / f"{start:06}.safetensors", *run.glob("state/**/*.safetensors")]
    for path in files:
        link = here / path.relative_to(run)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
