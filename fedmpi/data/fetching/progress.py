"""A line of progress on the console."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Takes `file: how far` again and again. On a terminal a line a file, rewritten; elsewhere its name once."""

    def __init__(self) -> None:
        self.file = ""

    def __call__(self, text: str) -> None:
        file, rewrites = text.partition(":")[0], sys.stderr.isatty()
        if rewrites:
            begin = "\r\x1b[K" if file == self.file or not self.file else "\n"
            sys.stderr.write(begin + text)
        elif file != self.file:
            sys.stderr.write(f"{file}\n")
        sys.stderr.flush()
        self.file = file


@contextmanager
def progress() -> Iterator[Progress]:
    """A `Progress` whose last line is ended, so that what is said next has one of its own."""
    shown = Progress()
    try:
        yield shown
    finally:
        if shown.file and sys.stderr.isatty():
            sys.stderr.write("\n")
