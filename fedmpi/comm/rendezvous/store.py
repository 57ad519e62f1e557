"""The client of the ranks' store; the store is a process on rank 0's host that holds named values for all ranks.

Connections are authenticated (auth.py), unlike those of torch's TCPStore, which listens on all addresses of the host
and accepts connections from any process. `RankStore` is a torch Store, so that gloo and NCCL can find their peers
through it.
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

from fedmpi.comm.base import ConnectionLostError, RankLostError, make_missing_ranks_error
from fedmpi.comm.rendezvous import auth
from fedmpi.comm.rendezvous.store_server import ALL_PRESENT, LENGTH_PREFIX, encode_message
from fedmpi.comm.timeouts import Timeouts

DEFAULT_TIMEOUT = timedelta(seconds=300)
STORE_IS_GONE = "rank 0 is dead: its store no longer answers"
CANCELLED = "cancelled"  # verdict of an allgather that was cancelled because the ranks regroup
REGROUPING = "another rank has reported a rank failure"


@final
class RankStore(Store):
    """A rank's connection to the store, as a torch Store.

    Methods raise DistStoreError if a value is not set in time, and DistNetworkError if the store does not answer.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes, connection: socket.socket, timeouts: Timeouts | None = None
    ) -> None:
        super().__init__()
        self.timeouts = timeouts or Timeouts()
        self.address, self.key, self.connection = address, key, connection
        self.lock = threading.Lock()  # gloo and NCCL use the connection from their own threads
        self.clones: list[RankStore] = []  # connections that must stay open as long as this one
        self.server: subprocess.Popen[bytes] | None = (
            None  # on rank 0, the store's process, which ends together with this one
        )

    def open_connection(self) -> RankStore:
        """Open another connection to the same store, for a thread or for a call that waits for a long time."""
        connection = auth.connect_authenticated(self.address, self.key, self.timeouts.reply)
        return RankStore(self.address, self.key, connection, self.timeouts)

    def clone(self) -> RankStore:
        """Open another connection for torch; it is stored here, because torch holds no Python reference to it."""
        self.clones.append(self.open_connection())
        return self.clones[-1]

    def get_ip_addresses(self) -> tuple[str, str]:
        """Return the IP addresses of this connection: this rank's and rank 0's."""
        return self.connection.getsockname()[0], self.connection.getpeername()[0]

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key, value)

    def set_on_disconnect(self, key: str, value: str) -> None:
        """Make the store set a key when this process has ended, unless the key is already set by then.

        This uses a separate connection, because the store does not notice the end of a connection that waits for a
        reply.
        """
        self.clone()._request("at_end", key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        exist, *values = self._request("read", *keys)
        if not exist:
            raise DistStoreError(f"a key was deleted while it was read: one of {' '.join(keys[:3])}")
        return [value.encode("latin-1") for value in values]

    def wait(self, keys: list[str], timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        seconds = timeout.total_seconds()
        if not self._request("wait", seconds, *keys, seconds=seconds)[0]:
            raise DistStoreError(f"a key was not set within {seconds:g} s: one of {' '.join(keys[:3])}")

    def check(self, keys: list[str]) -> bool:
        return bool(self._request("check", *keys)[0])

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return str(self._request("swap", key, expected_value, desired_value)[1]).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", key, amount)[1])

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", key)[0])

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
        skip_dead: bool = False,
    ) -> tuple[str, list[bytes]]:
        """Exchange a value with other ranks; return the verdict and the values of all ranks.

        The verdict is ALL_PRESENT if no rank is late, CANCELLED if the ranks regroup, and otherwise the numbers of the
        late ranks, separated by spaces. The values of late ranks are empty.

        Args:
            name: name of a series of allgathers.
            call: number of the allgather in that series.
            ranks: the ranks that take part.
            seconds: time limit.
            skip_dead: whether to stop waiting as soon as only dead ranks are missing.
        """
        verdict, *values = self._request("gather", seconds, skip_dead, name, call, rank, value, *ranks, seconds=seconds)
        return verdict, [each.encode("latin-1") for each in values]

    def _request(self, operation: str, *arguments: str | bytes | float, seconds: float = 0.0) -> list[Any]:
        """Send a request and return the store's reply; an error closes the connection permanently."""
        octets = [each.encode() if isinstance(each, str) else each for each in arguments]
        fields = [each.decode("latin-1") if isinstance(each, bytes) else each for each in octets]
        with self.lock:
            try:
                self.connection.settimeout(seconds + self.timeouts.reply)
                self.connection.sendall(encode_message(operation, *fields))
                (length,) = LENGTH_PREFIX.unpack(auth.receive_exactly(self.connection, LENGTH_PREFIX.size))
                return list(json.loads(auth.receive_exactly(self.connection, length)))
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
    """Send a few bytes from each rank to every rank, and return all payloads in the order of `ranks`.

    The store alone decides which ranks are late, so that all ranks agree. Otherwise a rank that has received all
    payloads would continue, while a rank that lacks one would give up.

    Args:
        name: name of a series of allgathers.
        call: number of the allgather in that series.
        ranks: the ranks that take part.
        deadline_s: time limit in seconds.
        remedy: advice at the end of the error message.

    Raises:
        RankLostError: ranks were late (the message names them), the ranks regroup, or rank 0 is dead.
    """
    try:
        verdict, values = store.gather(name, call, rank, ranks, payload, max(0.01, deadline_s))
    except DistError as error:
        raise ConnectionLostError(STORE_IS_GONE) from error
    if verdict == CANCELLED:
        raise RankLostError(REGROUPING)
    if verdict != ALL_PRESENT:
        raise make_missing_ranks_error(map(int, verdict.split()), len(ranks), deadline_s, remedy=remedy)
    return values


def wait_for_all_to_leave(store: RankStore, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
    """Wait until all ranks have called this function, so that rank 0 can end its store.

    Raises:
        RankLostError: a rank has not called it within timeout_s seconds.
    """
    try:
        verdict, _ = store.gather("left", 0, rank, ranks, b"", timeout_s)
    except DistError:  # rank 0 has left
        return
    if verdict != ALL_PRESENT:
        late = verdict.split()[0]
        raise RankLostError(
            f"rank {late} is silent: it has not disconnected within {timeout_s:g} s after its last message"
        )
