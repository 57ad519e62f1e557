"""A few named values that all ranks of a job see. Rank 0 holds them, behind comm/rendezvous/auth.py.

torch's own TCPStore lets everybody in who can reach its port, and listens on all of the host's addresses. This one is
a torch Store, too, so gloo and NCCL find their peers through it.
"""

from __future__ import annotations

import socket
import subprocess
import threading
from datetime import timedelta
from typing import final

from torch.distributed import DistNetworkError, DistStoreError, Store

from fedmpi.comm.rendezvous import auth
from fedmpi.comm.rendezvous.store_server import LENGTH, YES, packed, unpacked
from fedmpi.comm.timeouts import Timeouts

WAIT = timedelta(seconds=300)


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
        self.clones: list[RankStore] = []
        self.server: subprocess.Popen[bytes] | None = None  # rank 0's: it ends with the pipe to this process

    def new_connection(self, patience_s: float | None = None) -> RankStore:
        """One more connection, for a call that waits long."""
        connection = auth.connect_authenticated(self.address, self.key, patience_s or self.timeouts.reply)
        return RankStore(self.address, self.key, connection, self.timeouts)

    def connection_addresses(self) -> tuple[str, str]:
        """Return the addresses of this connection: that of this rank, and that of rank 0."""
        return self.connection.getsockname()[0], self.connection.getpeername()[0]

    def clone(self) -> RankStore:
        """The same for torch, which holds no reference that Python counts."""
        self.clones.append(self.new_connection(WAIT.total_seconds()))
        return self.clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def set_at_end(self, key: str, value: str) -> None:
        """Have the store set a key that is not there yet as soon as this connection has ended, as with its process."""
        self._ask("at_end", key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        said, *values = self._ask("read", *keys)
        if said != YES:
            raise DistStoreError(f"deleted meanwhile: one of {' '.join(keys[:3])}")
        return values

    def wait(self, keys: list[str], timeout: timedelta = WAIT) -> None:
        seconds = timeout.total_seconds()
        if self._ask("wait", str(seconds), *keys, seconds=seconds)[0] != YES:
            raise DistStoreError(f"not there after {seconds:g} s: one of {' '.join(keys[:3])}")

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", *keys)[0] == YES

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._ask("swap", key, expected_value, desired_value)[1]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount))[1])

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key)[0] == YES

    def num_keys(self) -> int:
        return int(self._ask("count")[1])

    def has_extended_api(self) -> bool:
        return False

    def _ask(self, *fields: str | bytes, seconds: float = 0.0) -> list[bytes]:
        """What rank 0 answers. A connection on which it once did not is of no use any more."""
        with self.lock:
            try:
                self.connection.settimeout(seconds + self.timeouts.reply)
                self.connection.sendall(packed(*(f.encode() if isinstance(f, str) else bytes(f) for f in fields)))
                (length,) = LENGTH.unpack(auth.receive(self.connection, LENGTH.size))
                return unpacked(auth.receive(self.connection, length))
            except OSError as error:
                self.connection.close()
                raise DistNetworkError(f"rank 0's store at {self.address[0]}:{self.address[1]}: {error}") from error
