"""Masks for vectors of 64-bit integers: streams of ChaCha20, which are added modulo 2^64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

CHUNK = 1 << 16  # entries that are masked at a time, so that they stay in the cache while all streams are added
MaskKey = tuple[bytes, int]  # key of 32 bytes that is used for nothing else; sign, 1 or -1
_ZEROS = memoryview(bytes(8 * CHUNK))


class MaskStreams:
    """A sum of masks, each with a sign, that is added to a vector piece by piece."""

    def __init__(self, keys: Sequence[MaskKey]) -> None:
        """Start the streams.

        Args:
            keys: the keys and signs of the masks. Masks with the same key and opposite signs cancel.
        """
        signs = Counter[bytes]()
        for key, sign in keys:
            signs[key] += sign
        self._streams = [
            (Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor(), np.add if sign > 0 else np.subtract)
            for key, sign in signs.items()
            if sign
        ]
        self._buffer = np.empty(CHUNK, dtype="<u8")

    def add_to(self, piece: Tensor) -> None:
        """Add the masks to the next piece of the vector, in place and modulo 2^64.

        Args:
            piece: (n,) int64 on the CPU, the entries that follow those of the previous call.
        """
        entries, stream_bytes = piece.numpy().view(np.uint64), self._buffer.data.cast("B")
        for start in range(0, len(entries), CHUNK):
            chunk = entries[start : start + CHUNK]
            mask, size = self._buffer[: len(chunk)], chunk.nbytes
            for stream, add in self._streams:
                stream.update_into(_ZEROS[:size], stream_bytes[:size])
                add(chunk, mask, out=chunk)
