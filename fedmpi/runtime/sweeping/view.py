"""What a sweep shows while it runs: on a terminal a live table below the lines, else (a log) a line for each run that
ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedmpi.common.text import count, duration, figure
from fedmpi.runtime.sweeping import progress
from fedmpi.runtime.sweeping.room import Held

if TYPE_CHECKING:
    from rich.live import Live

MOST_SHOWN = 20  # runs at once


class View:
    """todo: runs that are to be trained, of `every`; say: shows a line where nothing is live."""

    def __init__(self, todo: int, every: int, say: Callable[[str], None], live: bool | None = None) -> None:
        self.todo, self.every, self.plain = todo, every, say
        self.ended, self.failed, self.began = 0, 0, time.monotonic()
        self.running: Sequence[Held] = ()
        self.live: Live | None = None
        if sys.stdout.isatty() if live is None else live:
            from rich.console import Console
            from rich.live import Live

            # No thread of its own: children are forked from this process.
            self.live = Live("", console=Console(), auto_refresh=False, transient=True)
            self.live.start()

    def say(self, text: str) -> None:
        if self.live is None:
            self.plain(text)
        else:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self, name: str, text: str, failed: bool = False) -> None:
        """A run has ended; said at once."""
        self.ended, self.failed = self.ended + 1, self.failed + failed
        self.look([each for each in self.running if each.settings.name != name])
        self.say(f"[{self.every - self.todo + self.ended}/{self.every}] {name}: {text}{self._left()}")

    def look(self, running: Sequence[Held]) -> None:
        self.running = running
        if self.live is not None:
            from rich.text import Text

            self.live.update(Text("\n".join(self.lines())), refresh=True)

    def close(self) -> None:
        self.running = ()
        if self.live is not None:
            self.live.stop()

    def lines(self) -> list[str]:
        """A line for each run that is under way, and one for all."""
        shown = [_line(each) for each in self.running[:MOST_SHOWN]]
        if more := len(self.running) - len(shown):
            shown.append(f"  ... and {more} more")
        waiting = self.todo - self.ended - len(self.running)
        parts = [f"{self.every - self.todo + self.ended - self.failed} of {count(self.every, 'run')} done"]
        parts += [f"{self.failed} FAILED"] if self.failed else []
        parts += [f"{len(self.running)} running, {waiting} waiting"]
        return [*shown, ", ".join(parts) + self._left()]

    def _left(self) -> str:
        """Seconds until all are done, if what is left goes as what was done."""
        share = self.ended + sum(_share(each) for each in self.running)
        if not share or self.ended >= self.todo:
            return ""
        return f"; about {duration((time.monotonic() - self.began) / share * (self.todo - share))} left"


def _share(each: Held) -> float:
    """How much of what was left of a run has been done since it began here."""
    rounds = max(each.settings.rounds - each.rounds, 1)
    return min(max(progress.rounds(each.settings) - each.rounds, 0) / rounds, 1.0)


def _line(each: Held) -> str:
    row = progress.last(each.settings)
    said: list[Any] = [f"  {each.settings.name}", f"round {int(row.get('round', -1)) + 1}/{each.settings.rounds}"]
    if name := headline(row):
        said.append(f"{name.replace('_', ' ')} {figure(name, row[name])}")
    said.append(f"{time.monotonic() - each.began:.0f} s")
    return "  ".join(said)


def headline(row: dict[str, Any]) -> str:
    """The first figure of an evaluation, an accuracy if there is one."""
    names = [name for name, value in row.items() if name.endswith("accuracy") and value is not None]
    own = [name for name in names if not name.startswith("validation_")]
    return next(iter([*own, *names]), "loss" if row.get("loss") is not None else "")
