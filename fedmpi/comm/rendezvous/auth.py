"""Authenticate the processes of a job to each other: both sides prove that they know the job's key without sending it.

    client   MAGIC, 32 random bytes a
    rank 0   MAGIC, 32 random bytes b, HMAC-SHA256(key, "rank 0", a, b)
    client   HMAC-SHA256(key, "guest", a, b)

MAGIC identifies the protocol; a client is any process of the job. The key depends on the launcher. Under MPI it is
random and is sent by an MPI broadcast. Slurm and torchrun provide no channel that only the job's ranks can read, so
their key is derived from the job's identifier and a secret of the user: the variable FEDMPI_SECRET, or the file
~/.fedmpi/secret, which the first run creates.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.secret_files import read_or_create_secret

MAGIC = b"fedmpi 1"
NONCE_BYTES = DIGEST_BYTES = 32  # bytes
HELLO_BYTES, REPLY_BYTES = len(MAGIC) + NONCE_BYTES, len(MAGIC) + NONCE_BYTES + DIGEST_BYTES
MIN_SECRET_LENGTH = 32  # minimum number of characters of a secret
BACKLOG = 1024  # connections that may wait to be accepted


class AuthenticationError(OSError):
    """The answering process uses the protocol of rank 0's store, but does not know the key."""


def compute_proof(key: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Compute the bytes by which one side proves that it knows the key; role is b"rank 0" or b"guest"."""
    return hmac.digest(key, role + client_nonce + server_nonce, "sha256")


def answer_handshake(key: bytes, hello: bytes) -> tuple[bytes, bytes]:
    """Answer the first message of a connecting rank, on rank 0.

    Args:
        key: the secret key of the job.
        hello: the first message.

    Returns:
        The reply, which proves that rank 0 knows the key; and the proof that the connecting rank must send next.

    Raises:
        ValueError: the message does not follow the protocol.
    """
    if not hello.startswith(MAGIC):
        raise ValueError("another protocol")
    client_nonce, server_nonce = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    reply = MAGIC + server_nonce + compute_proof(key, b"rank 0", client_nonce, server_nonce)
    return reply, compute_proof(key, b"guest", client_nonce, server_nonce)


def connect_authenticated(address: tuple[str, int], key: bytes, timeout_s: float) -> socket.socket:
    """Return a socket connected to rank 0's store, after both sides have proved that they know the job's key.

    Args:
        address: host and port of the store.
        timeout_s: limit of each step in seconds.

    Raises:
        OSError: no store answers.
        AuthenticationError: the store that answers does not know the key.
    """
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client_nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + client_nonce)
        reply = receive_exactly(connection, REPLY_BYTES)
        server_nonce = reply[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
        if not reply.startswith(MAGIC):
            raise OSError("another service")
        if not hmac.compare_digest(reply[-DIGEST_BYTES:], compute_proof(key, b"rank 0", client_nonce, server_nonce)):
            raise AuthenticationError("another key")
        connection.sendall(compute_proof(key, b"guest", client_nonce, server_nonce))
    except BaseException:
        connection.close()
        raise
    return connection


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes. Raises OSError if the connection ends before that, or times out."""
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise OSError("the connection has ended")
        received += part
    return bytes(received)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address `host`, or on all addresses if `host` is "".

    Raises:
        OSError: the address or the port is not available.
    """
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def derive_job_key(job: str, env: Mapping[str, str]) -> bytes:
    """Derive the key of a job from the job's identifier and the user's secret.

    The secret is the variable FEDMPI_SECRET in `env`, or otherwise the content of the file ~/.fedmpi/secret.

    Raises:
        UserError: the secret is too short, or the file cannot be read or created, or other users may read it.
    """
    path = Path(env.get("HOME") or Path.home()) / ".fedmpi" / "secret"
    secret, source = env.get("FEDMPI_SECRET", "").encode(), "environment variable FEDMPI_SECRET"
    try:
        if not secret:
            secret, source = read_or_create_secret(path), str(path)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}. This file holds the secret by which the ranks of a job authenticate "
            "each "
            "other; make the directory writable, or export FEDMPI_SECRET=$(openssl rand -hex 32), the same for all "
            "ranks"
        ) from error
    if len(secret) < MIN_SECRET_LENGTH:
        raise UserError(
            f"{source} has {len(secret)} characters; at least {MIN_SECRET_LENGTH} are needed: delete it, or "
            "export FEDMPI_SECRET=$(openssl rand -hex 32), the same for all ranks"
        )
    return hmac.digest(hashlib.sha256(secret).digest(), job.encode(), "sha256")
