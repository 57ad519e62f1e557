"""Run hundreds of `fedmpi` commands fast: a server that has imported torch and fedmpi forks a child for each command.

The child behaves like a command of the shell: a process of its own that calls `fedmpi.cli.main()` with the given
arguments, environment, working directory and standard streams. Only the seconds for importing torch are saved.

COMMAND is a command that a launcher may start in place of `fedmpi`, or of `python` with a program of the tests. It is a
small process that asks the server to run the command, forwards its signals to the child and ends with the child's exit
code. If it is killed, the child is killed, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

SOCKET = "FEDMPI_FORK_SERVER"  # environment variable: path of the server's socket
COMMAND = [sys.executable, "-I", "-S", __file__]
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Server:
    """Starts the server as a child process, which ends with this process."""

    def __init__(self, env: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()  # only this user may access it
        self.name = f"{self._folder.name}/socket"
        words = [sys.executable, __file__, "serve", self.name]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self._process.stdout
        assert self._process.stdout.readline() == b"ready\n"
        command = Path(self._folder.name) / "fedmpi"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
        command.chmod(0o755)

    def client_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return environment variables with which COMMAND find this server, and the command `fedmpi` starts COMMAND."""
        return env | {SOCKET: self.name, "PATH": f"{self._folder.name}:{env['PATH']}"}

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)
        self._folder.cleanup()


# ---- the process that is started in place of the command ----
def _run_client() -> None:
    client = socket.socket(socket.AF_UNIX)
    client.connect(os.environ[SOCKET])
    job = json.dumps({"arguments": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    socket.send_fds(client, [len(job).to_bytes(8, "big")], [0, 1, 2])
    client.sendall(job)

    def forward_signal(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # the child has just ended
            client.send(bytes([number]))

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward_signal)
    answer = client.recv(8)
    code = int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL
    if code < 0:  # ended by this signal
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---- the server ----
def _serve(name: str) -> NoReturn:
    del sys.path[0]  # this folder is not in the module path of a real command
    import fedmpi.common.torchvision_compat
    import fedmpi.data.sources.images.class_images
    import fedmpi.reports.report
    import fedmpi.runtime.execute  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(64)
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C
    print("ready", flush=True)
    selector, children = selectors.DefaultSelector(), dict[int, socket.socket]()
    for each in (listener, wakes, sys.stdin):
        selector.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:  # closed
                for pid in children:
                    _kill(pid, signal.SIGKILL)
                os._exit(0)
            if key.fileobj is listener:
                client, _ = listener.accept()
                children[_fork(client, (listener, wakes, woken, selector))] = client
                selector.register(client, selectors.EVENT_READ)
            elif key.fileobj is wakes:
                wakes.recv(4096)
                _reap_children(children, selector)
            else:
                _forward_signals(key.fileobj, children, selector)


def _fork(client: socket.socket, own: tuple[Any, ...]) -> int:
    head, files, *_ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as stream:
        job = json.loads(stream.read(int.from_bytes(head, "big")))
    child = os.fork()
    if not child:
        for each in (*own, client):
            each.close()
        _run_child(job, files)
    for file in files:
        os.close(file)
    return child


def _reap_children(children: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            client = children.pop(pid)
            with contextlib.suppress(KeyError):
                selector.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            client.close()


def _forward_signals(client: Any, children: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Forward the signals that COMMAND has received to the child; kill the child if COMMAND has ended."""
    pid = next((pid for pid, each in children.items() if each is client), None)
    if pid is None:  # the child has just ended
        return
    numbers = b""
    with contextlib.suppress(OSError):
        numbers = client.recv(64)
    for number in numbers or [signal.SIGKILL]:
        _kill(pid, number)
    if not numbers:
        selector.unregister(client)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGKILL:  # kill the processes that it has started, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _run_child(job: dict[str, Any], files: list[int]) -> None:
    """Run the command in this child process, and exit with its exit code."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        code = _run(job["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(99)


def _run(words: list[str]) -> int:
    """Run `fedmpi` with these arguments, or a Python program of the tests, and return the exit code."""
    try:
        if words[0].endswith(".py"):
            sys.argv, sys.path[:0] = words, [os.path.dirname(words[0])]
            runpy.run_path(words[0], run_name="__main__")
            return 0
        from fedmpi import cli

        sys.argv = ["fedmpi", *words]
        cli.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(sys.argv[2])
    _run_client()
