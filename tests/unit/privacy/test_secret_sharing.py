"""Shamir's secret sharing, compared with the interpolation of polynomials in fractions."""

import random
import secrets
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from fedmpi.privacy.secagg.secret_sharing import (
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    combine_shares,
    combine_weights,
    split_secret,
)


def interpolate_at_zero(points):
    """Return the value at 0 of the polynomial through these points (x, y), in fractions: Newton's differences."""
    xs, column = [x for x, _ in points], [Fraction(y) for _, y in points]
    value, product = column[0], Fraction(1)
    for order in range(1, len(points)):
        column = [(b - a) / (xs[i + order] - xs[i]) for i, (a, b) in enumerate(pairwise(column))]
        product *= -xs[order - 1]
        value += product * column[0]
    return value


@pytest.mark.parametrize(("threshold", "n"), [(1, 1), (2, 3), (4, 7), (9, 9)])
def test_shares_give_the_secret_as_interpolation_in_fractions_does(threshold, n):
    draw = random.Random(n)
    secret, holders = secrets.token_bytes(SECRET_BYTES), sorted(draw.sample(range(1, 1000), n))
    shares = split_secret(secret, threshold, holders)
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for chosen in [draw.sample(holders, threshold) for _ in range(5)]:
        value = interpolate_at_zero([(x, int.from_bytes(shares[x], "big")) for x in chosen])
        expected = value.numerator * pow(value.denominator, -1, PRIME) % PRIME
        assert combine_shares(shares, combine_weights(chosen)) == expected.to_bytes(SECRET_BYTES, "big") == secret


def test_one_share_too_few_or_a_wrong_share_gives_another_value():
    secret = secrets.token_bytes(SECRET_BYTES)
    shares = split_secret(secret, 3, [1, 2, 3, 4])
    for two in combinations(shares, 2):
        assert combine_shares(shares, combine_weights(two)) != secret
    wrong = shares | {2: bytes(SHARE_BYTES)}
    assert combine_shares(wrong, combine_weights([1, 2, 3])) != secret


def test_a_single_share_is_uniform_whatever_the_secret_is():
    # The top byte of the lower 256 bits of a share is uniform on 256 values; chi-square with 15 degrees of freedom.
    for secret in (bytes(SECRET_BYTES), b"\xff" * SECRET_BYTES):
        counts = [0] * 16
        for _ in range(1600):
            counts[split_secret(secret, 2, [1, 2])[1][1] >> 4] += 1
        assert sum((c - 100) ** 2 / 100 for c in counts) < 60  # exceeded with probability 3e-7


def test_the_modulus_is_prime():
    # Miller and Rabin with 40 random bases
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (random.Random(1).randrange(2, PRIME - 1) for _ in range(40)):
        powers = [pow(base, odd << i, PRIME) for i in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers
