"""Secret sharing (Shamir 1979): any t of n shares give the secret, and fewer give no information about it.

The secret is the value at 0 of a random polynomial of degree t - 1 over the integers modulo PRIME, and the share of the
holder x is the value at x.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297  # the smallest prime above 2^256, so that every secret of 32 bytes is below it
SECRET_BYTES, SHARE_BYTES = 32, 33


def split_secret(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """Split a secret into shares, any `threshold` of which give the secret.

    Args:
        secret: SECRET_BYTES bytes.
        threshold: the number t of shares that are needed, at most the number of holders.
        holders: a different positive integer for each holder.

    Returns:
        holder -> share, SHARE_BYTES bytes.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _evaluate(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in holders}


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    """Return sum_i coefficients[i] x^i modulo PRIME."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def combine_weights(holders: Sequence[int]) -> dict[int, int]:
    """Return holder -> the weight of its share in the secret: the value at 0 of its Lagrange polynomial."""
    weights = dict[int, int]()
    for x in holders:
        numerator = denominator = 1
        for other in holders:
            if other != x:
                numerator, denominator = numerator * other % PRIME, denominator * (other - x) % PRIME
        weights[x] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def combine_shares(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """Return the secret, or None if the shares belong to no secret of SECRET_BYTES bytes.

    Args:
        shares: holder -> share; shares of holders that are not in `weights` are ignored.
        weights: the weights of exactly t holders (`combine_weights`).
    """
    value = sum(weight * int.from_bytes(shares[x], "big") for x, weight in weights.items()) % PRIME
    return value.to_bytes(SHARE_BYTES, "big")[1:] if value < 2 ** (8 * SECRET_BYTES) else None
