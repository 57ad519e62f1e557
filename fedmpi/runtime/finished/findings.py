"""What verifying a run has found: what was altered and where, and what could not be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmpi.common.metrics_row import VARIES_WITH_RANKS

VERIFIED, ALTERED, CANNOT = 0, 1, 2  # exit codes
NOTHING = object()


@dataclass
class Findings:
    """altered: what and where, a line each; unsure: why it cannot be told; suspects: rounds whose lines have changed
    since the seal."""

    say: Callable[[str], None]
    altered: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    suspects: set[int] = field(default_factory=set)

    def found(self, text: str) -> None:
        if text not in self.altered:
            self.altered.append(text)
            self.say(f"  ALTERED {text}")

    def cannot(self, text: str) -> None:
        if text not in self.unsure:
            self.unsure.append(text)
            self.say(f"  cannot tell: {text}")

    def fine(self, text: str) -> None:
        self.say(f"  ok {text}")

    @property
    def code(self) -> int:
        return ALTERED if self.altered else CANNOT if self.unsure else VERIFIED


@dataclass(frozen=True)
class Difference:
    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} is {_short(self.was)}, replaying gives {_short(self.now)}"


def differences(
    was: Mapping[str, Any], now: Mapping[str, Any], tolerance: float | None = None, *, partial: bool = False
) -> list[Difference]:
    """Keys of a row in which a replay differs from what is written.

    tolerance: how far apart numbers may be, relative to the larger one where that is above 1; then hashes are not
    compared. partial: the replay was stopped before it evaluated this round, and lacks these figures.
    """
    left_out = {*VARIES_WITH_RANKS, *(("sha256",) if tolerance is not None else ())}
    keys = [key for key in {**was, **now} if key not in left_out and not (partial and key not in now)]
    pairs = [(key, was.get(key, NOTHING), now.get(key, NOTHING)) for key in keys]
    return [Difference(*pair) for pair in pairs if not _same(pair[1], pair[2], tolerance)]


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


def _short(value: Any) -> str:
    if value is NOTHING:
        return "missing"
    said = str(value)
    return said if len(said) <= 24 else f"{said[:12]}..."
