"""Rounds of a run once more, in a temporary directory: from a checkpoint where one is before them, else the start."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from fedmpi.common.signals import CommandProcess
from fedmpi.config.schema import Settings
from fedmpi.runtime import trust
from fedmpi.runtime.record.durable import Damaged, read_tensors
from fedmpi.runtime.resuming import replay, resume
from fedmpi.runtime.run import execute

RARELY = 1_000_000  # rounds between checkpoints of a replay
NEAR = 10  # rounds, that are trained for the sake of the last one


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
        except (Damaged, KeyError, TypeError):
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
        process.stop.after = min(last + 2, total)
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
    return replay.settings(run, trusted, overrides, given)


def _begin(run: Path, here: Path, start: int) -> None:
    """A run directory that a job would go on with after this checkpoint; of the files links are enough."""
    (here / "checkpoints").mkdir(parents=True)
    (here / resume.IDENTITY).write_bytes((run / resume.IDENTITY).read_bytes())
    files = [run / "checkpoints" / f"{start:06}.safetensors", *run.glob("state/**/*.safetensors")]
    for path in files:
        link = here / path.relative_to(run)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
