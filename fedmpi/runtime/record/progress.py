"""What a run shows while it runs: a live line on a terminal, else (a Slurm log) one plain line per round."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from fedmpi.comm.loss.leaving import say
from fedmpi.common.formatting import duration
from fedmpi.common.text import figure

if TYPE_CHECKING:
    from rich.progress import Progress


class Console:
    """Shows rounds as they end; every line goes to `log` too.

    Args:
        rounds: number of rounds of the whole run.
        names: the metrics to show, such as ("loss", "accuracy").
        log: called with each line, such as `RunDirectory.log`.
        stream: where to show the lines; default: standard output.
        live: show a live line if the stream is a terminal. False under mpirun and srun --unbuffered, which give their
            ranks a terminal even if their own output goes to a file.
    """

    def __init__(
        self,
        rounds: int,
        names: Sequence[str],
        log: Callable[[str], None],
        stream: TextIO | None = None,
        live: bool = True,
    ) -> None:
        self.rounds, self.names, self.log = rounds, tuple(names), log
        self.stream = stream or sys.stdout
        self.told, self.wall_s = 0, 0.0  # rounds, and the seconds that they took
        self.progress: Progress | None = None
        if live and self.stream is not None and self.stream.isatty():
            from rich import progress
            from rich.console import Console as Terminal

            columns = (progress.BarColumn(), progress.TextColumn("{task.description}", markup=False))
            self.progress = progress.Progress(*columns, console=Terminal(file=self.stream))
            self.task = self.progress.add_task("starting", total=max(rounds, 1))
            self.progress.start()

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        self.log(text)
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self.stream is not None:  # None: closed when Python started
            say(text, self.stream)

    def round(self, row: Mapping[str, Any], more: Iterable[str] = ()) -> None:
        """One finished round: `row` as in metrics.jsonl (round, wall_s, metrics where it was evaluated).

        more: names of further figures of `row` to show, such as a method's own.
        """
        self.told, self.wall_s = self.told + 1, self.wall_s + float(row["wall_s"])
        done = int(row["round"]) + 1
        parts = [f"round {done}/{self.rounds}"]
        parts += [f"{name} {figure(name, row[name])}" for name in (*self.names, *more) if row.get(name) is not None]
        parts.append(f"{row['wall_s']:.1f} s")
        left_s = max(self.rounds - done, 0) * self.wall_s / self.told
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
