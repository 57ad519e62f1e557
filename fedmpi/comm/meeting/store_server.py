"""Rank 0's side of the ranks' store: a process that serves them all, waits for nobody, and ends with rank 0.

A process, since in rank 0's own no thread of Python runs while MPI_Finalize waits for the others; without torch, so it
is there at once.

    frame     4 bytes: how many follow; fields, each with 4 bytes of its length before it
    request   name of the operation, its arguments      reply   "yes" or "no", its result
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import final

from fedmpi.comm.meeting import door

LENGTH = struct.Struct("<I")
YES, NO = b"yes", b"no"
LONGEST = 2**24  # bytes of a frame
PROVES_S = 5.0  # allowed for a guest to prove that it is one
STRANGERS = 128  # guests that have not yet; the oldest goes where another comes
PAUSE_S = 0.01  # where no file can be opened any more


def packed(*fields: bytes) -> bytes:
    body = b"".join(LENGTH.pack(len(field)) + field for field in fields)
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> list[bytes]:
    """The fields of a frame without its length. Raises ValueError if they do not fill it."""
    fields, at = [], 0
    while at < len(body):
        length = int.from_bytes(body[at : at + LENGTH.size], "little")
        at += LENGTH.size
        fields.append(body[at : at + length])
        at += length
    if at != len(body):
        raise ValueError("fields and frame do not agree")
    return fields


class Guest:
    """One connection, as rank 0 sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.proof: bytes | None = None  # what it must send to be let in; None: it has not said hello
        self.admitted = False
        self.deadline = time.monotonic() + PROVES_S  # to prove itself, or for what it waits for
        self.missing: set[bytes] = set()  # keys that it waits for
        self.at_end: tuple[bytes, bytes] | None = None  # key and value to set once this connection has ended
        self.inbox, self.outbox = bytearray(), bytearray()


@final
class StoreServer:
    """`run` serves. A guest can do nothing before it has proved itself, and then harm nobody but itself."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.listener, self.key = listener, key
        self.port: int = listener.getsockname()[1]
        self.values: dict[bytes, bytes] = {}
        self.waiting: dict[bytes, set[Guest]] = {}  # key -> who waits for it
        self.guests: dict[Guest, None] = {}  # in the order in which they came
        self.selector = selectors.DefaultSelector()
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop the server: it takes no more connections, and `run` closes those that there are."""
        with contextlib.suppress(OSError):  # it is closed
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes `run`

    # ---- the loop ----
    def run(self) -> None:
        while self.listener.fileno() >= 0:
            first = min((guest.deadline for guest in self.guests), default=math.inf)
            for found, events in self.selector.select(None if first == math.inf else max(0, first - time.monotonic())):
                if found.data is None:
                    self._welcome()
                elif found.data in self.guests:  # one before it in the list may have sent it away
                    self._attend(found.data, events)
            self._past_deadlines()

    def _welcome(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EINVAL:  # shut down
                self._dismiss(*self.guests)
                self.selector.unregister(self.listener)
                self.listener.close()
            else:  # too many open files, or a guest that has gone again
                self._dismiss(*self._strangers()[:1])
                time.sleep(PAUSE_S)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        guest = Guest(connection)
        self.guests[guest] = None
        self.selector.register(connection, selectors.EVENT_READ, guest)
        self._dismiss(*self._strangers()[:-STRANGERS])

    def _strangers(self) -> list[Guest]:
        return [guest for guest in self.guests if not guest.admitted]

    def _attend(self, guest: Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(guest)
            if events & selectors.EVENT_READ:
                part = guest.connection.recv(2**16 if guest.admitted else door.HELLO)
                if not part:
                    raise OSError("it has left")
                guest.inbox += part
            self._understand(guest)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._dismiss(guest)

    def _past_deadlines(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self.guests if guest.deadline <= now]:
            if guest.admitted:
                self._reply(guest, NO)
            else:
                self._dismiss(guest)

    def _dismiss(self, *guests: Guest) -> None:
        for guest in guests:
            if guest in self.guests:
                del self.guests[guest]
                self._forget(guest)
                self.selector.unregister(guest.connection)
                guest.connection.close()
                if guest.at_end and guest.at_end[0] not in self.values:
                    self._set(*guest.at_end)

    # ---- a guest ----
    def _understand(self, guest: Guest) -> None:
        """Act on what has come, one thing after another; what is not whole, or must wait its turn, stays."""
        while guest.inbox and not guest.outbox and not guest.missing:
            if not guest.admitted:
                wanted = door.HELLO if guest.proof is None else door.DIGEST
                if len(guest.inbox) < wanted:
                    return
                said = self._take(guest, wanted)
                if guest.proof is None:
                    reply, guest.proof = door.answer(self.key, said)
                    guest.outbox += reply
                    self._send(guest)
                elif hmac.compare_digest(said, guest.proof):
                    guest.admitted, guest.deadline = True, math.inf
                else:
                    raise ValueError("it does not know the key")
                continue
            if len(guest.inbox) < LENGTH.size:
                return
            (length,) = LENGTH.unpack_from(guest.inbox)
            if length > LONGEST:
                raise ValueError("too long")
            if len(guest.inbox) < LENGTH.size + length:
                return
            operation, *arguments = unpacked(self._take(guest, LENGTH.size + length)[LENGTH.size :])
            self._act(guest, operation.decode(), arguments)

    def _take(self, guest: Guest, count: int) -> bytes:
        said = bytes(guest.inbox[:count])
        del guest.inbox[:count]
        return said

    def _act(self, guest: Guest, operation: str, arguments: list[bytes]) -> None:
        """One request. Raises ValueError if there is none of this name with so many arguments."""
        values = self.values
        match operation, arguments:
            case "set", [name, value]:
                self._set(name, value)
                self._reply(guest, YES)
            case "at_end", [name, value]:
                guest.at_end = name, value
                self._reply(guest, YES)
            case "swap", [name, expected, value]:
                if values.get(name, b"") == expected:
                    self._set(name, value)
                self._reply(guest, YES, values.get(name, expected))
            case "add", [name, number]:
                self._set(name, b"%d" % (int(values.get(name, b"0")) + int(number)))
                self._reply(guest, YES, values[name])
            case "delete", [name]:
                self._reply(guest, NO if values.pop(name, None) is None else YES)
            case "check", names:
                self._reply(guest, YES if all(name in values for name in names) else NO)
            case "count", []:
                self._reply(guest, YES, b"%d" % len(values))
            case "read", names:
                self._reply(guest, *([YES, *(values[name] for name in names)] if set(names) <= set(values) else [NO]))
            case "wait", [seconds, *names]:
                guest.missing = {name for name in names if name not in values}
                for name in guest.missing:
                    self.waiting.setdefault(name, set()).add(guest)
                if guest.missing:
                    guest.deadline = time.monotonic() + float(seconds)
                else:
                    self._reply(guest, YES)
            case _:
                raise ValueError("no such request")

    def _set(self, name: bytes, value: bytes) -> None:
        self.values[name] = value
        for guest in self.waiting.pop(name, ()):
            guest.missing.discard(name)
            if not guest.missing:
                with contextlib.suppress(OSError):  # it has left, which its own turn finds
                    self._reply(guest, YES)

    def _forget(self, guest: Guest) -> None:
        """It waits for nothing any more."""
        for name in guest.missing:
            self.waiting[name].discard(guest)
            if not self.waiting[name]:
                del self.waiting[name]
        guest.missing = set()

    def _reply(self, guest: Guest, *fields: bytes) -> None:
        self._forget(guest)
        guest.deadline = math.inf
        guest.outbox += packed(*fields)
        self._send(guest)

    def _send(self, guest: Guest) -> None:
        with contextlib.suppress(BlockingIOError):
            del guest.outbox[: guest.connection.send(guest.outbox)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.outbox else 0)
        self.selector.modify(guest.connection, events, guest)


def start(listener: socket.socket, key: bytes) -> subprocess.Popen[bytes]:
    """The process; it takes the listening socket over, and the key through a pipe whose end tells it that we have."""
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(listener.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # a signal to the job is for rank 0
    )
    assert process.stdin is not None
    process.stdin.write(key)
    process.stdin.flush()
    listener.close()
    return process


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    key = sys.stdin.buffer.read(door.DIGEST)

    def end_with_rank_0() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    StoreServer(socket.socket(fileno=int(sys.argv[1])), key).run()


if __name__ == "__main__":
    main()
