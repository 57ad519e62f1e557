"""Questions that may never be answered: to programs, to libraries, to the operating system. Each has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedmpi.doctor.lines import BAD, ODD, Line, said

Probe = Callable[[], list[Line]]
SLACK_S = 2.0  # in which a program that took too long is ended

# `python -c` looks for modules in the working directory first; a run does so last.
CHILD = "import sys; sys.path.append(sys.path.pop(0)); from fedmpi.doctor.inside import main; main()"


class Unanswered(Exception):  # noqa: N818  (an answer, if not the one asked for)
    """Why a program gave no answer."""


class CommandRunner:
    """Runs programs for the probes of one report; they end with the process that makes the report."""

    def __init__(self) -> None:
        self._running: set[int] = set()  # process groups of the programs
        self._starting = threading.Lock()  # held while there is a program that `_running` does not contain yet

    def run_command(self, words: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> str:
        """Run a program and return what it prints, errors included.

        Raises:
            Unanswered: it could not be started, ended with an error, or took too long.
        """
        code, text = self._run(words, limit_s, env)
        if code is None:
            raise Unanswered(f"gave no answer within {limit_s:g} s")
        if code:
            last = (text.strip().splitlines() or [""])[-1]
            raise Unanswered(f"{ended(code)}{': ' + last[:200] if last else ''}")
        return text

    def run_in_subprocess(self, *arguments: str, limit_s: float, env: Mapping[str, str] | None = None) -> list[Line]:
        """Return the lines that a child process prints (inside.py); if it hangs or dies, those until then and what it
        was doing."""
        code, text = self._run([sys.executable, "-c", CHILD, *arguments], limit_s, env)
        lines, at = [], arguments[0]
        for row in text.splitlines():
            try:
                kind, *found = json.loads(row)
            except ValueError:  # of a library, not of ours
                continue
            if kind == "at":
                at = found[0]
            else:
                lines.append(Line(*found))
        if code is None:
            lines.append(Line(at, f"gave no answer within {limit_s:g} s", ODD))
        elif code:
            why = (text.strip().splitlines() or [""])[-1][:200]
            lines.append(
                Line(at, f"the process that looked at it {ended(code)}: {why}", BAD if at == "config" else ODD)
            )
        return lines

    @contextlib.contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """Have a signal that ends this process end the programs, too: Ctrl-C does not reach them."""

        def end(number: int, frame: object) -> None:
            self._starting.acquire(timeout=1)
            for group in list(self._running):
                _kill(group)
            os._exit(128 + number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, end) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _run(self, words: Sequence[str], limit_s: float, env: Mapping[str, str] | None) -> tuple[int | None, str]:
        """Return (return code, None past the limit; output).

        The output goes to a file: whoever has the other end of a pipe may keep it open for ever.
        """
        with tempfile.TemporaryFile() as out:
            try:
                # A session of its own: its children end with it.
                with self._starting:
                    started = subprocess.Popen(
                        words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
                    )
                    self._running.add(started.pid)
            except OSError as error:
                raise Unanswered(f"does not start: {error.strerror or error}") from error
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = started.wait(limit_s)
            if code is None:
                _kill(started.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(SLACK_S)
            self._running.discard(started.pid)
            out.seek(0)
            return code, out.read(1 << 20).decode(errors="replace")


def ended(code: int) -> str:
    """How a process ended, from its return code other than 0."""
    if code > 0:
        return f"ends with exit code {code}"
    return f"was ended by {signal.Signals(-code).name if -code in list(signal.Signals) else f'signal {-code}'}"


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended
        os.killpg(group, signal.SIGKILL)


def all_at_once(probes: Sequence[tuple[str, Probe, float]]) -> list[list[Line]]:
    """The lines of each probe (name, function, seconds). One that fails or takes too long is a line that says so."""
    found: list[list[Line] | None] = [None] * len(probes)

    def look(number: int) -> None:
        name, probe, _ = probes[number]
        try:
            found[number] = probe()
        except Unanswered as error:
            found[number] = [Line(name, str(error), ODD)]
        except BaseException as error:
            found[number] = [Line(name, f"could not be found out: {said(error)}", ODD)]

    # Threads that nobody waits for: a file system or a name service may hold one for minutes.
    threads = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(len(probes))]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread, (_, _, limit_s) in zip(threads, probes, strict=True):
        thread.join(max(0.0, start + limit_s + 2 * SLACK_S - time.monotonic()))
    late = [[Line(name, f"gave no answer within {limit_s:g} s", ODD)] for name, _, limit_s in probes]
    return [lines if lines is not None else late[number] for number, lines in enumerate(found)]
