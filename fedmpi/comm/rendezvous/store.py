"""A few named values that all ranks of a job see. Rank 0 holds them, behind comm/rendezvous/auth.py.

torch's own TCPStore lets everybody in who can reach its port, and listens on all of the host's addresses. This one is
a torch Store, too, so gloo and NCCL find their peers through it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

from torch.distributed import DistError, DistNetworkError, DistStoreError, Store

from fedmpi.comm.base import ConnectionLostError, Lost, absent_error
from fedmpi.comm.rendezvous import auth
from fedmpi.comm.rendezvous.store_server import ALL, LENGTH, encode
from fedmpi.comm.timeouts import Timeouts

WAIT = timedelta(seconds=300)
STORE_IS_GONE = "rank 0 is dead: its store no longer answers"
CANCELLED = "cancelled"  # verdict of an allgather that ranks have left, to regroup
REGROUPING = "another rank has lost one"


@final
class RankStore(Store):
    """A rank's connection. Raises DistStoreError for a value that does not come in time, DistNetworkError where rank 0
    does not answer."""

    def __init__(
        self, address: tuple[str, int], key: bytes, connection: socket.socket, timeouts: Timeouts | None = None
    ) -> None:
        super().__init__()
        self.timeouts = timeouts or Timeouts()
        self.address, self.key, self.connection = address, key, connection
        self.lock = threading.Lock()  # gloo and NCCL call from threads of their own
        self.others: list[RankStore] = []  # connections that last as long as this one
        self.server: subprocess.Popen[bytes] | None = None  # rank 0's: it ends with the pipe to this process

    def new_connection(self) -> RankStore:
        """Return one more connection, for a call that waits long."""
        connection = auth.connect_authenticated(self.address, self.key, self.timeouts.reply)
        return RankStore(self.address, self.key, connection, self.timeouts)

    def clone(self) -> RankStore:
        """Return one more connection for torch, kept here because torch holds no reference that Python counts."""
        self.others.append(self.new_connection())
        return self.others[-1]

    def connection_addresses(self) -> tuple[str, str]:
        """Return the addresses of this connection: that of this rank, and that of rank 0."""
        return self.connection.getsockname()[0], self.connection.getpeername()[0]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def set_at_end(self, key: str, value: str) -> None:
        """Have the store set a key that is not there yet as soon as this process has ended.

        This has a connection of its own: the store does not notice the end of one over which a rank waits for a reply.
        """
        self.clone()._ask("at_end", key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        are_there, *values = self._ask("read", *keys)
        if not are_there:
            raise DistStoreError(f"deleted meanwhile: one of {' '.join(keys[:3])}")
        return [value.encode("latin-1") for value in values]

    def wait(self, keys: list[str], timeout: timedelta = WAIT) -> None:
        seconds = timeout.total_seconds()
        if not self._ask("wait", seconds, *keys, seconds=seconds)[0]:
            raise DistStoreError(f"not there after {seconds:g} s: one of {' '.join(keys[:3])}")

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys)[0])

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return str(self._ask("swap", key, expected_value, desired_value)[1]).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount)[1])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key)[0])

    def has_extended_api(self) -> bool:
        return False

    def gather(
        self,
        name: str,
        call: int,
        rank: int,
        ranks: Sequence[int],
        value: bytes,
        seconds: float,
        living: bool = False,
    ) -> tuple[str, list[bytes]]:
        """Return the verdict about the ranks that are silent, and the values of all ranks (store_server.py).

        living: do not wait for dead ranks.
        """
        verdict, *values = self._ask("gather", seconds, living, name, call, rank, value, *ranks, seconds=seconds)
        return verdict, [each.encode("latin-1") for each in values]

    def _ask(self, operation: str, *arguments: str | bytes | float, seconds: float = 0.0) -> list[Any]:
        """Return rank 0's reply. A connection that has once failed is closed for good."""
        octets = [each.encode() if isinstance(each, str) else each for each in arguments]
        fields = [each.decode("latin-1") if isinstance(each, bytes) else each for each in octets]
        with self.lock:
            try:
                self.connection.settimeout(seconds + self.timeouts.reply)
                self.connection.sendall(encode(operation, *fields))
                (length,) = LENGTH.unpack(auth.receive(self.connection, LENGTH.size))
                return list(json.loads(auth.receive(self.connection, length)))
            except OSError as error:
                self.connection.close()
                raise DistNetworkError(f"rank 0's store at {self.address[0]}:{self.address[1]}: {error}") from error


def allgather(
    store: RankStore,
    name: str,
    call: int,
    rank: int,
    ranks: Sequence[int],
    payload: bytes,
    deadline_s: float,
    remedy: str = "",
) -> list[bytes]:
    """Return a few bytes of every rank, in the order of `ranks`. The calls of one name are counted.

    The store alone decides which ranks are silent, so that all ranks act alike: otherwise a rank that has seen all
    others would go on while one that has not gives up.

    Raises Lost naming the ranks that are not there by the deadline, followed by the remedy.
    """
    try:
        verdict, values = store.gather(name, call, rank, ranks, payload, max(0.01, deadline_s))
    except DistError as error:
        raise ConnectionLostError(STORE_IS_GONE) from error
    if verdict == CANCELLED:
        raise Lost(REGROUPING)
    if verdict != ALL:
        raise absent_error(map(int, verdict.split()), len(ranks), deadline_s, remedy=remedy)
    return values


def leave(store: RankStore, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
    """Wait until all ranks have called this, so that rank 0 can end its store; raise Lost if one does not."""
    try:
        verdict, _ = store.gather("left", 0, rank, ranks, b"", timeout_s)
    except DistError:  # rank 0 has left
        return
    if verdict != ALL:
        late = verdict.split()[0]
        raise Lost(f"rank {late} is silent: it has not left for {timeout_s:g} s after the last message")
