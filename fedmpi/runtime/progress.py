"""What a run shows while it runs: a live line on a terminal, else (a Slurm log) one plain line per round."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TextColumn

from fedmpi.common.text import figure


class Console:
    """Shows rounds as they end; every line goes to `log` too.

    Args:
        rounds: number of rounds of the whole run.
        names: the metrics to show, such as ("loss", "accuracy").
        log: called with each line, such as `RunDirectory.log`.
        first: number of rounds done before, by a run that this one continues.
        stream: where to show the lines; default: standard output.
        live: show a live line if the stream is a terminal. False under mpirun and srun --unbuffered, which give their
            ranks a terminal even if their own output goes to a file.
    """

    def __init__(
        self,
        rounds: int,
        names: Sequence[str],
        log: Callable[[str], None],
        first: int = 0,
        stream: TextIO | None = None,
        live: bool = True,
    ) -> None:
        self.rounds, self.names, self.log = rounds, tuple(names), log
        self.stream = stream or sys.stdout
        self.wall_s: list[float] = []
        self.broken = False  # whether the stream takes no more lines
        self.progress: Progress | None = None
        if live and self.stream.isatty():
            columns = (BarColumn(), TextColumn("{task.description}", markup=False))
            self.progress = Progress(*columns, console=Terminal(file=self.stream))
            self.task = self.progress.add_task("starting", total=max(rounds, 1), completed=first)
            self.progress.start()

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        self.log(text)
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        """A reader that went away (`| head`), or a full disk, does not end training; the log goes on."""
        if not self.broken:
            try:
                print(text, file=self.stream, flush=True)
            except (OSError, ValueError):
                self.broken = True

    def round(self, row: Mapping[str, Any], more: Iterable[str] = ()) -> None:
        """One finished round: `row` as in metrics.jsonl (round, wall_s, metrics where it was evaluated).

        more: names of further figures of `row` to show, such as a method's own.
        """
        self.wall_s.append(float(row["wall_s"]))
        done = int(row["round"]) + 1
        parts = [f"round {done}/{self.rounds}"]
        parts += [f"{name} {figure(name, row[name])}" for name in (*self.names, *more) if row.get(name) is not None]
        parts.append(f"{row['wall_s']:.1f} s")
        left_s = max(self.rounds - done, 0) * sum(self.wall_s) / len(self.wall_s)
        if left_s > 0:
            parts.append(f"eta {duration(left_s)}")
        line = "  ".join(parts)
        if self.progress is None:
            self.say(line)
        else:
            self.log(line)
            self.progress.update(self.task, completed=done, description=line)

    def close(self) -> None:
        """Ends the live line, so that what follows starts on a line of its own."""
        if self.progress is not None:
            self.progress.stop()


def duration(seconds: float) -> str:
    """A duration for people, to about two digits.

    >>> duration(45), duration(75), duration(3600), duration(9000)
    ('45 s', '1 min', '60 min', '2.5 h')
    """
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
