"""`fedmpi ...` by the hundred: a process that has imported what a run needs, and forks a child for each command.

The child is what the console would have started: its own process, `fedmpi.cli.main()` with these arguments, its own
directory and its own two streams. Only the seconds that importing torch takes are not spent anew for each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 20.0


class Done(NamedTuple):
    """What a command left: exit code (-9: still running after `LIMIT_S`), what it said, and how long it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Server:
    """The parent's side."""

    def __init__(self, env: dict[str, str]) -> None:
        words = [sys.executable, __file__]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def __call__(self, *arguments: object, cwd: Path) -> Done:
        assert self._process.stdin
        assert self._process.stdout
        job = {"arguments": [str(each) for each in arguments], "cwd": str(cwd)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def _serve() -> None:
    import fedmpi.common.torchvision_compat
    import fedmpi.data.sources.image_folder
    import fedmpi.runtime.launch  # noqa: F401

    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.monotonic()
            child = os.fork()
            if not child:
                _be(job["arguments"], job["cwd"], out.fileno(), err.fileno())
            code = _wait(child, began + LIMIT_S)
            seconds = time.monotonic() - began
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        print(json.dumps(Done(code, *said, seconds)._asdict()), flush=True)


def _be(arguments: list[str], cwd: str, out: int, err: int) -> None:
    """Become the command, and never come back."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(cwd)
        sys.argv = ["fedmpi", *arguments]
        from fedmpi import cli

        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(99)  # main() came back, or raised what it should have caught


def _wait(child: int, until: float) -> int:
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    _serve()
