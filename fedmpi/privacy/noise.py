"""Gaussian noise from a secret key, so that nobody can compute it from what a run directory contains.

A run has a random identifier, which is public, and the key is secret and outside of the run directory. The noise of a
purpose, such as a round and its attempt, is

    stream  = ChaCha20(HKDF-SHA256(key, salt = identifier, info = purpose))
    u_1, u_2 from the stream, uniform in (0, 1)
    noise   = std sqrt(-2 ln u_1) (cos(2 pi u_2), sin(2 pi u_2))                     (Box and Muller 1958)

The same key, identifier and purpose give the same noise. Two releases of one round differ in the attempt, and runs
differ in the identifier, so that no noise is used twice.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.secret_files import read_or_create_secret

MIN_KEY_LENGTH = 32  # minimum number of characters of a key
CHUNK = 1 << 20  # pairs of numbers that are drawn at a time


class NoiseKey:
    """The secret from which the noise of a run is derived, together with the public identifier of the run."""

    def __init__(self, secret: bytes, run_id: str) -> None:
        """Create the key.

        Args:
            secret: the content of the key file.
            run_id: the identifier of the run, which must not be used by another run.
        """
        self._secret, self.run_id = secret, run_id

    @classmethod
    def load(cls, path: Path, run_id: str, *, create: bool = True) -> NoiseKey:
        """Read the key from a file.

        Args:
            run_id: the identifier of the run.
            create: whether to create a random key if the file is missing.

        Raises:
            UserError: the file cannot be read or created, other users can read it, or its key is too short.
        """
        if not create and not path.expanduser().exists():
            raise UserError(
                f"privacy.noise_file: {path} does not exist, but the noise of this run depends on the key in it; set "
                "privacy.noise_file to that key"
            )
        try:
            secret = read_or_create_secret(path.expanduser())
        except OSError as error:
            raise UserError(
                f"privacy.noise_file: {path}: {error.strerror or error}. This file holds the secret from which noise "
                "is derived; set privacy.noise_file to a file that only you can read"
            ) from error
        if len(secret) < MIN_KEY_LENGTH:
            raise UserError(
                f"privacy.noise_file: {path} has {len(secret)} characters; at least {MIN_KEY_LENGTH} are needed; "
                "delete the file, so that a new key is created"
            )
        return cls(secret, run_id)

    def derive(self, *purpose: str | int) -> bytes:
        """Return 32 bytes that depend on the secret, the run and the purpose."""
        info = "/".join(map(str, purpose)).encode()
        return HKDF(SHA256(), length=32, salt=self.run_id.encode(), info=info).derive(self._secret)

    @property
    def fingerprint(self) -> str:
        """A public text by which two keys of the same run can be compared, without revealing them."""
        return self.derive("fingerprint").hex()[:16]

    def gaussian(self, n: int, std: float, *purpose: str | int) -> Tensor:
        """Return n numbers from a normal distribution with mean 0 and standard deviation `std`, (n,) float64."""
        return draw_gaussian(self.derive(*purpose), n, std)

    def uniform(self, n: int, *purpose: str | int) -> Tensor:
        """Return n numbers from the uniform distribution on (0, 1), (n,) float64."""
        parts = list(_iterate_uniform(self.derive("uniform", *purpose), n))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def seed(self, *purpose: str | int) -> int:
        """Return a secret 63-bit seed for one purpose, such as the drawing of cohorts."""
        return int.from_bytes(self.derive("seed", *purpose)[:8], "little") >> 1


def draw_gaussian(key: bytes, n: int, std: float) -> Tensor:
    """Return n numbers from a normal distribution, (n,) float64, which depend only on the 32-byte key.

    A key must be used only once, because all calls with the same key begin with the same numbers.
    """
    out, start = torch.empty(n + n % 2, dtype=torch.float64), 0
    for numbers in _iterate_uniform(key, len(out)):
        pairs = len(numbers) // 2
        uniform = numbers.view(2, pairs)
        radius, angle = uniform[0].log_().mul_(-2).sqrt_().mul_(std), uniform[1].mul_(2 * math.pi)
        torch.mul(radius, angle.cos(), out=out[start : start + pairs])
        torch.mul(radius, angle.sin_(), out=out[start + pairs : start + 2 * pairs])
        start += 2 * pairs
    return out[:n]


def _iterate_uniform(key: bytes, n: int) -> Iterator[Tensor]:
    """Yield n numbers from the uniform distribution on (0, 1), in float64 vectors of at most 2 CHUNK entries."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = bytes(8 * min(2 * CHUNK, n))
    for start in range(0, n, 2 * CHUNK):
        integers = np.frombuffer(stream.update(zeros[: 8 * (n - start)]), dtype="<u8")
        # The 53 upper bits make a number in [0, 1); half of the spacing is added, so that it is never 0.
        yield torch.from_numpy((integers >> np.uint64(11)).astype(np.float64)).add_(0.5).mul_(2.0**-53)


def new_run_id() -> str:
    """Return a random identifier for a run, 32 hexadecimal digits."""
    return secrets.token_hex(16)
