"""Attack the ports of a job as another process of the host could: garbage, silence, impossible lengths, floods."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from pathlib import Path

from fedmpi.comm.rendezvous import auth

CLAIMS = [struct.pack(form, size) for form in ("<I", ">I", "<Q", ">Q") for size in (2**31, 2**31 - 1, 0)]
GARBAGE = [
    b"",
    b"\0" * 4096,
    b"\xff" * 100_000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    auth.MAGIC,
    auth.MAGIC + b"\0" * auth.NONCE_BYTES,
    auth.MAGIC + b"\0" * (auth.NONCE_BYTES + auth.DIGEST_BYTES),
    auth.MAGIC + b"\0" * (auth.NONCE_BYTES + auth.DIGEST_BYTES) + b"\x7f\xff\xff\xff" * 100,
    *CLAIMS,
    *(claim + b"\x01" * 50 for claim in CLAIMS),
]


def listeners(pids: list[int]) -> dict[tuple[str, int], int]:
    """Return {(address, port): process id} of the TCP sockets on which these processes listen."""
    inodes = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes[os.readlink(fd)] = pid
    found = {}
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            name = f"socket:[{words[9]}]"
            if words[3] == "0A" and name in inodes:
                address, port = words[1].split(":")
                raw = b"".join(struct.pack("<I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
                found[socket.inet_ntop(family, raw), int(port, 16)] = inodes[name]
    return found


class Attacker:
    """Sends random garbage to ports repeatedly until `stop` is called, and keeps some connections open.

    Args:
        where: (address, port) of each port.
        hold: number of connections that are kept open.
        seed: seed of the random choices.
        pause_s: longest pause between two passes over the ports, in seconds.
    """

    def __init__(self, where, hold: int = 60, seed: int = 0, pause_s: float = 0.01) -> None:
        self.where, self.hold, self.chance, self.pause_s = list(where), hold, random.Random(seed), pause_s
        self.held: list[socket.socket] = []
        self.tries = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._attack, daemon=True)
        self._thread.start()

    def _attack(self) -> None:
        while not self._done.is_set():
            for host, port in self.where:
                self.tries += 1
                with contextlib.suppress(OSError):
                    guest = socket.create_connection((host, port), timeout=0.5)
                    guest.setblocking(False)
                    self.held.append(guest)
                    guest.send(self.chance.choice(GARBAGE))
            while len(self.held) > self.hold:
                self.held.pop(self.chance.randrange(len(self.held))).close()
            self._done.wait(self.chance.uniform(0, self.pause_s))

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        for guest in self.held:
            guest.close()
