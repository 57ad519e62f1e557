"""The process of the ranks' store, which serves the connections of all ranks and ends with rank 0.

It is a separate process, because no Python thread of rank 0 can run while MPI_Finalize waits for the other ranks. It
does not import torch, so that it starts quickly.

A message is a JSON list, preceded by its length in 4 bytes: a request [operation, argument, ...] or a reply
[result, ...]. Values are bytes, written as strings with one Latin-1 character per byte.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import Any, final

from fedmpi.comm.rendezvous import auth

LENGTH_PREFIX = struct.Struct("<I")
ALL_PRESENT = "all"  # verdict of an allgather: all ranks have called it in time
MAX_MESSAGE_BYTES = 2**24  # maximum number of bytes of a message
AUTHENTICATION_TIMEOUT_S = 5.0  # time limit for a connection to prove that it knows the key
CHECK_INTERVAL_S = 0.02  # interval at which ranks are checked for having died
MAX_UNAUTHENTICATED = 128  # maximum number of connections without such a proof; if there are more, the oldest is closed


def encode_message(*fields: Any) -> bytes:
    """Encode a list of fields as a message: the length in 4 bytes, then JSON."""
    body = json.dumps(fields).encode()
    return LENGTH_PREFIX.pack(len(body)) + body


@final
class StoreServer:
    """The server of the store, which answers only authenticated connections.

    A request that violates the protocol closes only its own connection.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self.listener, self.key = listener, key
        self.values: dict[str, str] = {}
        self.arrivals: dict[str, asyncio.Event] = {}  # events of the values that a request waits for
        self.unauthenticated: dict[
            asyncio.Task[None], None
        ] = {}  # tasks of unauthenticated connections, the oldest first
        self.loop, self.closing = asyncio.new_event_loop(), asyncio.Event()

    def run(self) -> None:
        """Serve until `close` is called."""
        self.loop.set_exception_handler(lambda loop, context: None)  # asyncio tries again after "too many open files"
        self.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self.listener)
        await self.closing.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Make `run`, which runs in another thread, close all connections and return."""
        self.loop.call_soon_threadsafe(self.closing.set)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection until it is closed or violates the protocol."""
        at_end = list[str]()
        try:
            await self._authenticate(reader, writer)
            while True:
                (length,) = LENGTH_PREFIX.unpack(await reader.readexactly(LENGTH_PREFIX.size))
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError("too long")
                operation, *arguments = json.loads(await reader.readexactly(length))
                if operation == "at_end":
                    at_end = arguments
                writer.write(encode_message(*await self._reply(operation, arguments)))
                await writer.drain()
        except (OSError, EOFError, ValueError, TypeError):
            pass
        finally:
            writer.close()
            if at_end and at_end[0] not in self.values:
                self._set(*at_end)

    async def _authenticate(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Raise ValueError if the client does not know the key; cancel the task if it takes too long."""
        task = asyncio.current_task()
        assert task is not None
        self.unauthenticated[task] = None
        if len(self.unauthenticated) > MAX_UNAUTHENTICATED:
            next(iter(self.unauthenticated)).cancel()
        limit = self.loop.call_later(AUTHENTICATION_TIMEOUT_S, task.cancel)
        try:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            reply, proof = auth.answer_handshake(self.key, await reader.readexactly(auth.HELLO_BYTES))
            writer.write(reply)
            if not hmac.compare_digest(await reader.readexactly(auth.DIGEST_BYTES), proof):
                raise ValueError("the other side does not know the key")
        finally:
            limit.cancel()
            del self.unauthenticated[task]

    async def _reply(self, operation: str, arguments: list[Any]) -> list[Any]:
        """Carry out a request and return the reply; raise ValueError if the operation or its arguments are invalid."""
        values = self.values
        match operation, arguments:
            case "at_end", [_, _]:
                return [True]
            case "set", [str(name), value]:
                self._set(name, value)
                return [True]
            case "swap", [name, expected, value]:
                if values.get(name, "") == expected:
                    self._set(name, value)
                return [True, values.get(name, expected)]
            case "add", [name, number]:
                self._set(name, str(int(values.get(name, "0")) + int(number)))
                return [True, values[name]]
            case "delete", [name]:
                return [values.pop(name, None) is not None]
            case "check", names:
                return [values.keys() >= set(names)]
            case "read", names:
                return [True, *(values[name] for name in names)] if values.keys() >= set(names) else [False]
            case "wait", [seconds, *names]:
                return [await self._wait(names, seconds)]
            case "gather", [seconds, skip_dead, name, int(call), rank, value, *ranks]:
                self._set(f"{name}/{call}/{rank}", value)
                self.values.pop(f"dead/{rank}", None)  # the rank was frozen, but has called in time
                return await self._gather(seconds, bool(skip_dead), name, call, ranks)
        raise ValueError("no such request")

    async def _wait(self, names: list[str], seconds: float) -> bool:
        """Wait until all values are set, for at most `seconds`; return whether they are set."""

        async def wait_for_values() -> None:
            for name in names:
                while name not in self.values:
                    await self.arrivals.setdefault(name, asyncio.Event()).wait()

        try:
            await asyncio.wait_for(wait_for_values(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def _gather(self, seconds: float, skip_dead: bool, name: str, call: int, ranks: list[int]) -> list[str]:
        """Return the verdict of an allgather, followed by the values of all ranks.

        The verdict is the same for all ranks: ALL_PRESENT, or the ranks whose values are missing when the first
        caller's time limit expires. With `skip_dead`, the verdict is reached as soon as only dead ranks are missing.
        """
        verdict, keys = f"{name}/{call}/silent", {rank: f"{name}/{call}/{rank}" for rank in ranks}
        until = self.loop.time() + seconds
        while verdict not in self.values:
            missing = [rank for rank, key in keys.items() if key not in self.values]
            left_s = until - self.loop.time()
            if left_s <= 0 or all(skip_dead and f"dead/{rank}" in self.values for rank in missing):
                self._set(verdict, " ".join(map(str, missing)) or ALL_PRESENT)
                for key in () if missing else ("silent", *ranks):  # all ranks have read the values of the previous call
                    self.values.pop(f"{name}/{call - 1}/{key}", None)
            else:
                await self._wait([verdict], min(left_s, CHECK_INTERVAL_S) if skip_dead else left_s)
        return [self.values[verdict], *(self.values.get(key, "") for key in keys.values())]

    def _set(self, name: str, value: str) -> None:
        self.values[name] = value
        if arrival := self.arrivals.pop(name, None):
            arrival.set()


def start_store_process(listener: socket.socket, key: bytes) -> subprocess.Popen[bytes]:
    """Start the process of the store, which takes over the listening socket.

    The new process reads the key from a pipe, and ends when the pipe is closed, at the latest when rank 0 ends.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(listener.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # signals that are sent to the job's processes must not end the store
    )
    assert process.stdin is not None
    process.stdin.write(key)
    process.stdin.flush()
    listener.close()
    return process


def main() -> None:
    """Run the store in this process until rank 0 closes the pipe on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    key = sys.stdin.buffer.read(auth.DIGEST_BYTES)

    def end_with_rank_0() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    StoreServer(socket.socket(fileno=int(sys.argv[1])), key).run()


if __name__ == "__main__":
    main()
