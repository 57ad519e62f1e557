"""Create all random number generators of a run, each from the experiment's seed and the purpose of the numbers.

The numbers depend on the purpose and never on earlier draws, so that they stay the same if a run is resumed, or if the
number of ranks or the order of clients changes:

    seeds.torch_generator(0, "batches", round_, client)

All generators are on the CPU; a run on a GPU copies the drawn numbers to the GPU.

A user's code may use the global generators of torch, numpy and random instead. They are seeded for one purpose while
that code runs, and their states are restored afterwards.
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

# torch holds the mutex of a generator while it allocates the tensor for the generator's state. If garbage is collected
# at that moment, another thread may run; if it requests the same state, it waits for the mutex while it holds Python's
# global lock: a deadlock. Therefore only one thread at a time may access the states.
_state_lock = threading.RLock()

RngState = tuple[Tensor, Any, Any, list[Tensor]]  # torch on the CPU, numpy, random, torch on each GPU


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Derive a 63-bit seed for one purpose.

    The seed is the first bytes of the SHA-256 of the experiment's seed and the words of the purpose, so that different
    purposes have different streams of random numbers.
    """
    words = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 1


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Create a torch generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Create a numpy generator for one purpose, such as a partition or a cohort."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *purpose)))


def seed_global_generators(seed: int, *purpose: str | int) -> None:
    """Seed the global generators of torch, numpy and random for one purpose; their previous states are not restored."""
    number = derive_seed(seed, *purpose)
    with _state_lock:
        # torch.manual_seed would also record a stack trace for each kind of device that is not initialised.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
    # torch and numpy seed the same algorithm with the lower 32 bits of a number, so the same number would give both
    # the same stream.
    np.random.seed(number >> 32)
    random.seed(number)


def get_rng_state() -> RngState:
    """Return the states of the global random number generators of torch, numpy and random."""
    with _state_lock:
        at, on_gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return at, np.random.get_state(legacy=False), random.getstate(), on_gpus


def set_rng_state(states: RngState) -> None:
    """Set the states of the global random number generators to those that `get_rng_state` returned."""
    with _state_lock:
        torch.set_rng_state(states[0])
        if states[3]:  # empty if no GPU was in use at that time
            torch.cuda.set_rng_state_all(states[3])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the states of the global random number generators at the end of the block."""
    before = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


@contextmanager
def temporary_seed(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed the global random number generators for one purpose, and restore their states at the end of the block."""
    before = get_rng_state()
    try:
        seed_global_generators(seed, *purpose)
        yield
    finally:
        set_rng_state(before)
