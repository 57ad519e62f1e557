"""Who may join a job: processes that know its key. Both sides prove it; neither says it.

    guest    MAGIC, 32 random bytes a
    rank 0   MAGIC, 32 random bytes b, HMAC-SHA256(key, "rank 0", a, b)
    guest    HMAC-SHA256(key, "guest", a, b)

The key comes from the launcher: under MPI it is random and travels by an MPI broadcast. Slurm and torchrun have no
channel that only the job's ranks can read, so there it is made of the job's number and a secret of the user's: the
variable FEDMPI_SECRET or the file ~/.fedmpi/secret, which the first run makes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from fedmpi.common.errors import UserError

MAGIC = b"fedmpi 1"
NONCE = DIGEST = 32  # bytes
HELLO, REPLY = len(MAGIC) + NONCE, len(MAGIC) + NONCE + DIGEST
SHORTEST = 32  # characters of a FEDMPI_SECRET
BACKLOG = 1024


class AuthenticationError(OSError):
    """What answers speaks as rank 0 does, and does not know the key."""


def hmac_proof(key: bytes, who: bytes, asked: bytes, answered: bytes) -> bytes:
    return hmac.digest(key, who + asked + answered, "sha256")


def server_handshake(key: bytes, hello: bytes) -> tuple[bytes, bytes]:
    """Rank 0's reply to a hello, and the proof that it waits for. Raises ValueError if it is no hello."""
    if len(hello) != HELLO or not hello.startswith(MAGIC):
        raise ValueError("no hello")
    asked, nonce = hello[len(MAGIC) :], secrets.token_bytes(NONCE)
    return MAGIC + nonce + hmac_proof(key, b"rank 0", asked, nonce), hmac_proof(key, b"guest", asked, nonce)


def connect_authenticated(address: tuple[str, int], key: bytes, patience_s: float) -> socket.socket:
    """Connect to rank 0's store, each step within patience_s.

    Raises:
        AuthenticationError: what answers does not know the key.
        OSError: no store answers.
    """
    connection = socket.create_connection(address, timeout=patience_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        asked = secrets.token_bytes(NONCE)
        connection.sendall(MAGIC + asked)
        reply = receive(connection, REPLY)
        nonce = reply[len(MAGIC) : len(MAGIC) + NONCE]
        if not reply.startswith(MAGIC):
            raise OSError("another service")
        if not hmac.compare_digest(reply[-DIGEST:], hmac_proof(key, b"rank 0", asked, nonce)):
            raise AuthenticationError("another key")
        connection.sendall(hmac_proof(key, b"guest", asked, nonce))
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises OSError if the other side ends first, or does not send for a time-out."""
    got = bytearray()
    while len(got) < count:
        part = connection.recv(count - len(got))
        if not part:
            raise OSError("the connection has ended")
        got += part
    return bytes(got)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at one address of this host; at all, where `host` is "" or is not this host's.

    Raises OSError if the port is taken.
    """
    if host:
        try:
            return socket.create_server((host, port), backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # an address that leads here by other hosts' translation
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def job_key(job: str, env: Mapping[str, str]) -> bytes:
    """The key of one job of this user's, by the job's name. Raises UserError if there can be no secret."""
    return hmac.digest(user_secret(env), job.encode(), "sha256")


def user_secret(env: Mapping[str, str]) -> bytes:
    said = env.get("FEDMPI_SECRET", "")
    if said and len(said) < SHORTEST:
        raise UserError(
            f"environment variable FEDMPI_SECRET has {len(said)} characters; at least {SHORTEST} are needed: "
            "export FEDMPI_SECRET=$(openssl rand -hex 32), the same for all ranks, or leave it out"
        )
    if said:
        return hashlib.sha256(said.encode()).digest()
    path = Path(env.get("HOME") or Path.home()) / ".fedmpi" / "secret"
    try:
        text = from_file(path)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}. It holds the secret by which the ranks of a job know each other; make "
            "the directory writable, or export FEDMPI_SECRET=$(openssl rand -hex 32), the same for all ranks"
        ) from error
    return hashlib.sha256(text).digest()


def from_file(path: Path) -> bytes:
    """The secret in a file that is the user's alone; made whole if it is not there, by whoever is first."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        mine = path.with_name(f"secret.{secrets.token_hex(8)}")
        with open(os.open(mine, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another rank was first; a link is made or not, on NFS, too
            os.link(mine, path)
        mine.unlink()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise OSError(errno.EPERM, "others may read this secret; chmod 600 it, or delete it for a new one")
        text = file.read(4096).strip()
    if len(text) < SHORTEST:
        raise OSError(errno.EINVAL, "holds no secret; delete it, and the next run makes a new one")
    return text
