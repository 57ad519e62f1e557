"""The process that holds the ranks' store: it serves the connections of all ranks, and ends with rank 0.

It is a process of its own because in rank 0's no thread of Python runs while MPI_Finalize waits for the other ranks. It
does not import torch, so that it starts at once.

    frame     4 bytes: how many follow; fields, each with 4 bytes of its length before it
    request   name of the operation, its arguments      reply   "yes" or "no", its result
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import final

from fedmpi.comm.rendezvous import auth

LENGTH = struct.Struct("<I")
YES, NO = b"yes", b"no"
LONGEST = 2**24  # bytes of a frame
AUTHENTICATION_S = 5.0  # allowed for a connection to prove that it knows the key
UNAUTHENTICATED = 128  # connections that have not yet; the oldest is closed when there are more


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


@final
class StoreServer:
    """Serves named values. A connection can do nothing before it is authenticated, and then harm nobody but itself."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.listener, self.key = listener, key
        self.port: int = listener.getsockname()[1]
        self.values: dict[bytes, bytes] = {}
        # name of a value -> who waits for it: the names that are still missing, and what is set once none is
        self.waiting: dict[bytes, list[tuple[set[bytes], asyncio.Future[None]]]] = {}
        self.connections: dict[asyncio.Task[None], None] = {}
        self.unauthenticated: dict[asyncio.Task[None], None] = {}  # the oldest first
        self.loop, self.closing = asyncio.new_event_loop(), asyncio.Event()

    def run(self) -> None:
        """Serve until `close` is called."""
        self.loop.set_exception_handler(lambda loop, context: None)  # too many open files: it is tried again
        self.loop.run_until_complete(self._run())
        self.loop.close()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self.listener)
        await self.closing.wait()
        server.close()
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    def close(self) -> None:
        """Let `run`, in another thread, close all connections and return."""
        with contextlib.suppress(RuntimeError):  # it has returned
            self.loop.call_soon_threadsafe(self.closing.set)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = self.loop.create_task(self._serve(reader, writer))
        self.connections[task] = self.unauthenticated[task] = None
        task.add_done_callback(self.connections.pop)
        if len(self.unauthenticated) > UNAUTHENTICATED:
            oldest = next(iter(self.unauthenticated))
            del self.unauthenticated[oldest]
            oldest.cancel()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection until it ends or breaks the protocol."""
        task, at_end = asyncio.current_task(), list[bytes]()
        assert task is not None
        limit = self.loop.call_later(AUTHENTICATION_S, task.cancel)
        try:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._authenticate(reader, writer)
            limit.cancel()
            self.unauthenticated.pop(task, None)
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > LONGEST:
                    raise ValueError("too long")
                match unpacked(await reader.readexactly(length)):
                    case [b"at_end", name, value]:
                        at_end, reply = [name, value], [YES]
                    case [b"wait", seconds, *names]:
                        reply = [YES if await self._wait(reader, set(names), float(seconds)) else NO]
                    case [operation, *arguments]:
                        reply = self._answer(operation, arguments)
                    case _:
                        raise ValueError("no request")
                writer.write(packed(*reply))
                await writer.drain()
        except (OSError, EOFError, ValueError):
            pass
        finally:
            limit.cancel()
            self.unauthenticated.pop(task, None)
            writer.close()
            if at_end and at_end[0] not in self.values:
                self._set(*at_end)

    async def _authenticate(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Raise ValueError if the other side does not know the key."""
        reply, proof = auth.server_handshake(self.key, await reader.readexactly(auth.HELLO))
        writer.write(reply)
        if not hmac.compare_digest(await reader.readexactly(auth.DIGEST), proof):
            raise ValueError("it does not know the key")

    async def _wait(self, reader: StreamReader, names: set[bytes], seconds: float) -> bool:
        """Return whether all values are there within so many seconds. Raises EOFError if the connection ends before."""
        missing, arrival = names - self.values.keys(), self.loop.create_future()
        if not missing:
            return True
        for name in missing:
            self.waiting.setdefault(name, []).append((missing, arrival))
        end = self.loop.create_task(reader.read(1))  # who waits sends nothing
        try:
            await asyncio.wait({arrival, end}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise EOFError
        finally:
            for name in missing:
                self.waiting[name].remove((missing, arrival))
                if not self.waiting[name]:
                    del self.waiting[name]
            end.cancel()
            await asyncio.wait({end})
        return arrival.done()

    def _answer(self, operation: bytes, arguments: list[bytes]) -> list[bytes]:
        """Return the reply to a request. Raises ValueError if there is none of this name with so many arguments."""
        values = self.values
        match operation, arguments:
            case b"set", [name, value]:
                self._set(name, value)
                return [YES]
            case b"swap", [name, expected, value]:
                if values.get(name, b"") == expected:
                    self._set(name, value)
                return [YES, values.get(name, expected)]
            case b"add", [name, number]:
                self._set(name, b"%d" % (int(values.get(name, b"0")) + int(number)))
                return [YES, values[name]]
            case b"delete", [name]:
                return [NO if values.pop(name, None) is None else YES]
            case b"check", names:
                return [YES if all(name in values for name in names) else NO]
            case b"count", []:
                return [YES, b"%d" % len(values)]
            case b"read", names:
                return [YES, *(values[name] for name in names)] if values.keys() >= set(names) else [NO]
        raise ValueError("no such request")

    def _set(self, name: bytes, value: bytes) -> None:
        self.values[name] = value
        for missing, arrival in self.waiting.pop(name, ()):
            missing.discard(name)
            if not missing and not arrival.done():
                arrival.set_result(None)


def start(listener: socket.socket, key: bytes) -> subprocess.Popen[bytes]:
    """Start the process, which takes over the listening socket. It gets the key through a pipe, and ends when the other
    end of that closes, as with the process that has started it."""
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
    key = sys.stdin.buffer.read(auth.DIGEST)

    def end_with_rank_0() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    StoreServer(socket.socket(fileno=int(sys.argv[1])), key).run()


if __name__ == "__main__":
    main()
