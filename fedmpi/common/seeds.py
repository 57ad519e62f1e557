"""The only source of randomness: (experiment seed, purpose...) -> generator.

A generator is a function of what it is for, never of what was drawn before it, so that a resumed run, another number of
ranks or another order of clients draws the same numbers:  seeds.generator(0, "batches", round_, client).
All of them live on the CPU; a GPU run moves what they drew.

A user's code may draw from the global generators of torch, numpy and random instead: these are seeded for one purpose
while it runs, and put back.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

# torch makes the tensor of a generator's state with that generator's mutex in hand. If garbage is collected meanwhile,
# another thread may run, and if it asks for the same, it waits for the mutex with Python's lock in hand: both for good.
_one = threading.RLock()

State = tuple[Tensor, Any, Any, list[Tensor]]  # of the global generators: torch's on the CPU, numpy's, random's, GPUs'


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose: the first bytes of SHA-256 over its words, so that no streams coincide."""
    words = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a torch generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a numpy generator for one purpose, such as a partition or a cohort."""
    return np.random.Generator(np.random.PCG64(derive(seed, *purpose)))


def reseed(seed: int, *purpose: str | int) -> None:
    """Seed the global generators (parameter initialisation, dropout, np.random) for one purpose; within `seeded`."""
    number = derive(seed, *purpose)
    with _one:
        # torch.manual_seed would do it, and note a stack trace for each kind of device that is not there.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
    # torch seeds the same algorithm by the lower 32 bits, as numpy does: of one number they would draw the same.
    np.random.seed(number >> 32)
    random.seed(number)


def state() -> State:
    """Return the states of the global generators."""
    with _one:
        at, on_gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return at, np.random.get_state(legacy=False), random.getstate(), on_gpus


def set_state(at: State) -> None:
    """Set the global generators to states that `state` has returned."""
    with _one:
        torch.set_rng_state(at[0])
        if at[3]:  # else no GPU was in use then
            torch.cuda.set_rng_state_all(at[3])
    np.random.set_state(at[1])
    random.setstate(at[2])


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the states of the global generators at the end of the block."""
    before = state()
    try:
        yield
    finally:
        set_state(before)


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed the global generators for one purpose, and restore their states at the end of the block."""
    before = state()
    try:
        reseed(seed, *purpose)
        yield
    finally:
        set_state(before)
