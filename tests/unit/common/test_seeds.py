"""One stream a purpose, a function of its arguments alone."""

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedmpi.common import seeds


def test_by_hand():
    """The first eight bytes of SHA-256 of the words, little-endian, top bit dropped: any language can redo it."""
    head = hashlib.sha256(b"7/batches/3/12/0").digest()[:8]
    assert seeds.derive(7, "batches", 3, 12, 0) == int.from_bytes(head, "little") // 2
    assert seeds.derive(2**63 - 1, "init") < 2**63


def test_no_two_purposes_share_a_stream():
    """All that the engine asks for, with rounds and clients whose digits could run together: (1, 12), (11, 2)."""
    numbers = (0, 1, 2, 11, 12, 112)
    purposes = [("init",), ("partition",), ("holdout",)]
    purposes += [("cohort", t) for t in numbers] + [("client_test", k) for k in numbers]
    purposes += [("torch", t, k) for t in numbers for k in numbers]
    purposes += [("batches", t, k, fit) for t in numbers for k in numbers for fit in (0, 1)]
    found = {seeds.derive(seed, *purpose) for seed in numbers for purpose in purposes}
    assert len(found) == len(numbers) * len(purposes)


def test_what_was_drawn_before_does_not_matter():
    first = torch.randperm(50, generator=seeds.generator(0, "batches", 1, 2, 0))
    torch.randn(10)
    torch.randperm(9, generator=seeds.generator(0, "batches", 1, 1, 0))
    assert torch.equal(torch.randperm(50, generator=seeds.generator(0, "batches", 1, 2, 0)), first)
    assert not torch.equal(torch.randperm(50, generator=seeds.generator(0, "batches", 1, 3, 0)), first)
    draws = [seeds.numpy_rng(0, "cohort", t).random(4) for t in (5, 5, 6)]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_generators_live_on_the_cpu():
    assert seeds.generator(0, "x").device.type == "cpu"


def fail():
    with seeds.scoped(0, "init"):
        torch.rand(3)
        raise KeyError


def test_scoped_draws_are_put_back():
    """Inside a function of the purpose, outside the caller's stream, as if nothing had been drawn; errors included."""
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with seeds.scoped(0, "torch", 1, 2):
        inside = torch.rand(3)
    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.rand(3), expected)
    with seeds.scoped(0, "torch", 1, 2):
        assert torch.equal(torch.rand(3), inside)


THREADS = """
import gc, sys, threading, torch
from fedmpi.common import seeds

def work():
    for t in range(500):
        x = torch.randn(3, requires_grad=True)
        cycle = [x, x.sum()]
        cycle.append(cycle)
        del cycle, x
        with seeds.restored():
            seeds.reseed(0, "a", t)

torch.set_num_threads(1)
gc.set_threshold(1)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(3)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


def test_threads_do_not_wait_for_each_other_for_good():
    """torch's generator gives its state with a mutex in hand, while garbage is collected and others run."""
    assert subprocess.run([sys.executable, "-c", THREADS], timeout=120).returncode == 0


def test_numpy_and_random_are_seeded_and_put_back_too():
    """With numbers of their own: torch's generator and numpy's are of one kind."""
    np.random.seed(4), random.seed(4)
    expected = np.random.rand(), random.random()
    np.random.seed(4), random.seed(4)
    inside = []
    for _ in range(2):
        with seeds.scoped(0, "torch", 1, 2):
            inside.append((torch.rand(8, dtype=torch.float64).tolist(), np.random.rand(8).tolist(), random.random()))
    assert inside[0] == inside[1]
    assert not {*inside[0][0]} & {*inside[0][1]}
    assert (np.random.rand(), random.random()) == expected
    at = seeds.state()
    first = np.random.rand(), random.random()
    seeds.go_on(at)
    assert (np.random.rand(), random.random()) == first


def test_generators_of_gpus_go_on_from_where_they_were(monkeypatch):
    """A client that is trained with others goes on in `upload` from where `receive` has stopped drawing."""
    gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [g.get_state() for g in gpus])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda at: [g.set_state(s) for g, s in zip(gpus, at, strict=True)]
    )
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: [g.manual_seed(seed) for g in gpus])

    def drawn():
        return [torch.rand(1, generator=g).item() for g in gpus]

    at = seeds.state()
    first = drawn()
    with seeds.scoped(0, "torch", 1, 2):
        inside = drawn()
    with seeds.scoped(0, "torch", 1, 2):
        assert drawn() == inside
    seeds.go_on(at)
    assert drawn() == first != inside
