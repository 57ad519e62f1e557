"""What a partition raises or returns is told: its line, what was expected, what came."""

import numpy as np
import pytest
from plugin_play import check_told, play, sections_of


def part_none(labels, clients, rng):
    return None


def part_text(labels, clients, rng):
    return "abc"


def part_twice(labels, clients, rng):
    return [np.arange(14)] * clients


def part_outside(labels, clients, rng):
    return np.array_split(np.arange(1, len(labels) + 1), clients)


def part_negative(labels, clients, rng):
    return np.array_split(np.arange(-1, len(labels) - 1), clients)


def part_float(labels, clients, rng):
    return [part.astype(float) for part in np.array_split(np.arange(len(labels)), clients)]


def part_masks(labels, clients, rng):
    return [np.arange(len(labels)) % clients == k for k in range(clients)]


def part_columns(labels, clients, rng):
    return [part[:, None] for part in np.array_split(np.arange(len(labels)), clients)]


def part_empty(labels, clients, rng):
    return [np.arange(len(labels)), *[[]] * (clients - 1)]


def part_few(labels, clients, rng):
    return np.array_split(np.arange(len(labels)), clients - 1)


def part_objects(labels, clients, rng):
    return [None] * clients


def part_raises(labels, clients, rng):
    for k in range(clients):
        yield np.arange(k, len(labels), clients)
    raise MemoryError("no more")


TOLD = [
    # plug-in, what the message says
    (part_none, "returned NoneType; it must return a list of index arrays, one a client"),
    (part_text, "returned str; it must return"),
    (part_twice, "handed out sample 0 more than once"),
    (part_outside, r"gave client 2 indices 28..40 \(int64\); whole numbers 0..39 are allowed"),
    (part_negative, r"gave client 0 indices -1..12"),
    (part_float, r"gave client 0 indices 0.0..13.0 \(float64\); whole numbers"),
    (part_masks, r"gave client 0 a mask of bool; .*np.flatnonzero\(mask\)"),
    (part_columns, r"gave client 0 ndarray of shape \(14, 1\)"),
    (part_empty, "left client 1 without a training sample"),
    (part_few, "returned 2 index arrays for clients=3"),
    (part_objects, r"gave client 0 NoneType of shape \(\)"),
    (part_raises, r"out of memory \(no more\); lower"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("partition", thing, message)


def part_forgets(labels, clients, rng):
    return np.array_split(np.arange(30), clients)


def test_samples_that_a_partition_forgets_are_counted():
    with pytest.warns(UserWarning, match="leaves 10 of 40 training samples with nobody"):
        play(**sections_of("partition", part_forgets))
