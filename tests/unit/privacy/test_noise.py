"""Noise from a secret key: its distribution, its independence, a naive computation of it, and the file of the key."""

import hashlib
import hmac
import itertools
import math
import os
import stat

import numpy as np
import pytest
import torch
from scipy import stats

from fedmpi.common.errors import UserError
from fedmpi.privacy import noise
from fedmpi.privacy.noise import NoiseKey, new_run_id

SECRET, N = b"0123456789abcdef" * 4, 200_000


@pytest.fixture
def key():
    return NoiseKey(SECRET, "run")


# ---- distribution ----
def test_the_variance_is_that_of_the_standard_deviation(key):
    """The sum of squares has a chi-square distribution; the keys are fixed, and so is the result."""
    for std, t in itertools.product((0.5, 1.0, 123.0), range(4)):
        squares = (key.gaussian(N, std, "round", t) / std).square().sum().item()
        assert 1e-3 < stats.chi2.cdf(squares, N) < 1 - 1e-3


def test_a_wrong_variance_would_be_noticed(key):
    squares = key.gaussian(N, 1.01, "round", 0).square().sum().item()
    assert stats.chi2.sf(squares, N) < 1e-6


def test_the_distribution_is_normal(key):
    for t in range(4):
        assert stats.kstest(key.gaussian(N, 1.0, "round", t).numpy(), "norm").pvalue > 1e-3
    # Both halves of Box and Muller's pairs, and the tails.
    values = key.gaussian(N, 1.0, "round", 0).numpy()
    assert all(stats.kstest(half, "norm").pvalue > 1e-3 for half in np.split(values, 2))
    beyond = (np.abs(values) > 3).sum()
    assert 1e-3 < stats.binom.cdf(beyond, N, 2 * stats.norm.sf(3)) < 1 - 1e-3


def test_neighbouring_numbers_are_independent(key):
    values = key.gaussian(N, 1.0, "round", 0).numpy()
    for lag in (1, 2, N // 2):  # the numbers of a pair are N / 2 apart
        first, second = values[:-lag], values[lag:]
        assert stats.pearsonr(first, second).pvalue > 1e-3
        assert stats.pearsonr(first**2, second**2).pvalue > 1e-3


# ---- independence of rounds, attempts and runs ----
def test_purposes_attempts_and_runs_have_independent_noise(key):
    drawn = [
        key.gaussian(N, 1.0, "round", 3, 0),
        key.gaussian(N, 1.0, "round", 3, 1),  # another attempt
        key.gaussian(N, 1.0, "round", 4, 0),
        key.gaussian(N, 1.0, "count", 3, 0),  # another purpose
        NoiseKey(SECRET, "another run").gaussian(N, 1.0, "round", 3, 0),
        NoiseKey(SECRET[::-1], "run").gaussian(N, 1.0, "round", 3, 0),
    ]
    for first, second in itertools.combinations(drawn, 2):
        assert stats.pearsonr(first.numpy(), second.numpy()).pvalue > 1e-4
        assert not torch.isin(first, second).any()


def test_the_same_purpose_has_the_same_noise(key):
    again = NoiseKey(SECRET, "run")
    assert torch.equal(key.gaussian(1001, 2.0, "round", 3, 0), again.gaussian(1001, 2.0, "round", 3, 0))
    assert key.seed("cohort", 1) == again.seed("cohort", 1)
    assert len({key.seed("cohort", t) for t in range(100)}) == 100
    assert all(0 <= key.seed("cohort", t) < 2**63 for t in range(100))
    assert key.seed("cohort", 1) != NoiseKey(SECRET, "another run").seed("cohort", 1)


def test_run_identifiers_differ():
    identifiers = {new_run_id() for _ in range(100)}
    assert len(identifiers) == 100
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in identifiers)


# ---- a naive computation ----
def chacha20(key, length):
    """Return a key stream with a nonce of zeros: RFC 8439, section 2.4."""

    def rotate(value, bits):
        return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF

    def quarter_round(state, a, b, c, d):
        for first, second, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[first] = (state[first] + state[second]) & 0xFFFFFFFF
            state[third] = rotate(state[third] ^ state[first], bits)

    constants = [int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4)]
    words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    stream = b""
    for block in range(-(-length // 64)):
        initial = [*constants, *words, block, 0, 0, 0]
        state = list(initial)
        for _ in range(10):
            for column in range(4):
                quarter_round(state, *(column + 4 * row for row in range(4)))
            for column in range(4):
                quarter_round(state, *((column + row) % 4 + 4 * row for row in range(4)))
        for word, start in zip(state, initial, strict=True):
            stream += ((word + start) & 0xFFFFFFFF).to_bytes(4, "little")
    return stream[:length]


def hkdf(secret, salt, info):
    """Return 32 bytes: RFC 5869 with SHA-256, one block."""
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def naive_gaussian(secret, run_id, n, std, purpose, chunk):
    pairs = -(-n // 2)
    stream = chacha20(hkdf(secret, run_id.encode(), purpose.encode()), 16 * pairs)
    numbers, result = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(2 * pairs)], []
    while numbers:
        count = min(chunk, len(numbers) // 2)
        uniform = [((each >> 11) + 0.5) / 2**53 for each in numbers[: 2 * count]]
        numbers = numbers[2 * count :]
        pairs_of_chunk = zip(uniform[:count], uniform[count:], strict=True)
        polar = [(std * math.sqrt(-2 * math.log(u)), 2 * math.pi * v) for u, v in pairs_of_chunk]
        result += [radius * math.cos(angle) for radius, angle in polar]
        result += [radius * math.sin(angle) for radius, angle in polar]
    return result[:n]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 64, 333])
@pytest.mark.parametrize("chunk", [4, noise.CHUNK])
def test_noise_is_that_of_a_naive_computation(key, n, chunk, monkeypatch):
    monkeypatch.setattr(noise, "CHUNK", chunk)
    drawn = key.gaussian(n, 1.5, "round", 12, 1)
    assert drawn.shape == (n,)
    assert drawn.dtype == torch.float64
    expected = naive_gaussian(SECRET, "run", n, 1.5, "round/12/1", chunk)
    assert np.allclose(drawn.numpy(), expected, rtol=1e-12, atol=1e-15)


def test_numbers_do_not_depend_on_the_number_of_threads(key):
    threads = torch.get_num_threads()
    drawn = []
    for count in (1, 3):
        torch.set_num_threads(count)
        drawn.append(key.gaussian(100_001, 1.0, "round", 0))
    torch.set_num_threads(threads)
    assert torch.equal(*drawn)


# ---- the file of the key ----
def test_a_missing_file_is_created_for_the_owner_only(tmp_path):
    path = tmp_path / "folder" / "noise_file"
    first = NoiseKey.load(path, "run")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) == 64
    assert NoiseKey.load(path, "run").derive("round") == first.derive("round")
    other = NoiseKey.load(tmp_path / "other", "run")
    assert other.derive("round") != first.derive("round")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "noise_file"
    NoiseKey.load(path, "run")
    path.chmod(mode)
    with pytest.raises(UserError, match=r"privacy\.noise_file: .*other users may read this secret; run chmod 600"):
        NoiseKey.load(path, "run")


def test_a_short_key_is_refused(tmp_path):
    path = tmp_path / "noise_file"
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write("x" * 31)
    with pytest.raises(UserError, match=r"privacy\.noise_file: .* has 31 characters; at least 32 are needed"):
        NoiseKey.load(path, "run")


def test_a_file_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"privacy\.noise_file: .*set privacy\.noise_file to a file that only you"):
        NoiseKey.load(tmp_path / "file" / "noise_file", "run")
