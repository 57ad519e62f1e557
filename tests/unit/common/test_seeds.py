"""Each purpose has a stream of random numbers that depends only on its arguments."""

import hashlib
import random

import numpy as np
import pytest
import torch

from fedmpi.common import seeds


def test_seed_is_the_sha256_of_the_purpose():
    """The seed is the first eight bytes of the SHA-256 of the words, little-endian, without the top bit."""
    head = hashlib.sha256(b"7/batches/3/12/0").digest()[:8]
    seed = int.from_bytes(head, "little") // 2
    assert seeds.derive_seed(7, "batches", 3, 12, 0) == seed
    assert seeds.torch_generator(7, "batches", 3, 12, 0).initial_seed() == seed
    assert seeds.numpy_generator(7, "batches", 3, 12, 0).random() == np.random.Generator(np.random.PCG64(seed)).random()


def test_no_two_purposes_share_a_stream():
    """Covers all purposes of the engine, with rounds and clients whose digits could be confused: (1, 12), (11, 2)."""
    numbers = (0, 1, 2, 11, 12, 112)
    purposes = [("init",), ("partition",), ("holdout",)]
    purposes += [("cohort", t) for t in numbers] + [("client_test", k) for k in numbers]
    purposes += [("torch", t, k) for t in numbers for k in numbers]
    purposes += [("batches", t, k, fit) for t in numbers for k in numbers for fit in (0, 1)]
    found = {seeds.derive_seed(seed, *purpose) for seed in numbers for purpose in purposes}
    assert len(found) == len(numbers) * len(purposes)


def fail_within_a_purpose():
    with seeds.temporary_seed(0, "init"):
        torch.rand(3), np.random.rand(), random.random()
        raise KeyError


def draw():
    return torch.rand(8, dtype=torch.float64).tolist(), np.random.rand(8).tolist(), random.random()


def test_global_generators_are_seeded_and_restored():
    """This holds for torch, numpy and random, even after an error; no two of them draw the same numbers."""
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    at = seeds.get_rng_state()
    expected = draw()
    seeds.set_rng_state(at)
    inside = []
    for _ in range(2):
        with seeds.temporary_seed(0, "torch", 1, 2):
            inside.append(draw())
    with pytest.raises(KeyError):
        fail_within_a_purpose()
    assert draw() == expected
    assert inside[0] == inside[1] != expected
    assert not {*inside[0][0]} & {*inside[0][1]}


def test_generators_of_gpus_are_seeded_and_restored(monkeypatch):
    gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [g.get_state() for g in gpus])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda at: [g.set_state(s) for g, s in zip(gpus, at, strict=True)]
    )
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: [g.manual_seed(seed) for g in gpus])

    def drawn():
        return [torch.rand(1, generator=g).item() for g in gpus]

    at = seeds.get_rng_state()
    first = drawn()
    with seeds.temporary_seed(0, "torch", 1, 2):
        inside = drawn()
    with seeds.temporary_seed(0, "torch", 1, 2):
        assert drawn() == inside
    seeds.set_rng_state(at)
    assert drawn() == first != inside
