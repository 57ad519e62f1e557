"""Who takes part, and where."""

import math
from itertools import product

import numpy as np
import pytest

from fedmpi.engine.scheduler import balanced, cohort_size, draw_cohort, pinned


def test_a_cohort_is_a_function_of_seed_and_round():
    table = {(seed, t): tuple(draw_cohort(seed, t, 30, 0.3)) for seed in range(6) for t in range(6)}
    assert len(set(table.values())) == 36  # among 14 million subsets of 9
    np.random.seed(1)
    assert {key: tuple(draw_cohort(*key, 30, 0.3)) for key in reversed(table)} == table
    cohorts = [draw_cohort(3, t, 10, 0.35) for t in range(400)]
    for members in cohorts:
        assert len(set(members)) == len(members) == 3  # floor(3.5)
        assert members == sorted(members)
    times = np.bincount(np.concatenate(cohorts), minlength=10)
    assert abs(times - 120).max() < 5 * math.sqrt(400 * 0.3 * 0.7)  # five standard deviations of a binomial count


@pytest.mark.parametrize(("clients", "fraction", "rounds"), [(4, 0.25, 4), (7, 0.3, 4), (6, 1.0, 1), (5, 0.4, 3)])
def test_cycles_have_each_client_once(clients, fraction, rounds):
    """In an order of its own each cycle; the last round of a cycle takes the rest."""
    drawn = [draw_cohort(3, t, clients, fraction, "cycles") for t in range(40 * rounds)]
    cycles = [drawn[at : at + rounds] for at in range(0, len(drawn), rounds)]
    for cycle in cycles:
        assert sorted(k for members in cycle for k in members) == list(range(clients))
        assert {len(members) for members in cycle[:-1]} <= {cohort_size(clients, fraction)}
    assert rounds == 1 or len({str(cycle) for cycle in cycles}) > 10
    assert rounds == 1 or len({tuple(cycle[0]) for cycle in cycles}) > 1


@pytest.mark.parametrize(("clients", "fraction", "m"), [(7, 0.01, 1), (10, 0.3, 3), (10, 1.0, 10), (100, 0.29, 29)])
def test_size_of_a_cohort(clients, fraction, m):
    """max(floor(fraction N), 1); 0.29 * 100 is 29 and not 28 in floating point."""
    assert len(draw_cohort(0, 0, clients, fraction)) == m


@pytest.mark.parametrize("seed", range(12))
def test_balanced_is_within_a_third_of_the_best(seed):
    """Graham 1969: longest processing time first ends within 4/3 - 1/(3 W) of the optimum, here found by trying all."""
    rng = np.random.default_rng(seed)
    ranks, costs = [1, 2, 3], rng.integers(1, 30, 7).astype(float).tolist()
    members = sorted(rng.choice(40, 7, replace=False).tolist())
    where = balanced(members, costs, ranks)

    def longest(places):
        return max(sum(c for c, r in zip(costs, places, strict=True) if r == rank) for rank in ranks)

    best = min(longest(places) for places in product(ranks, repeat=7))
    assert longest([where[k] for k in members]) <= best * (4 / 3 - 1 / 9) + 1e-9
    assert list(where) == members


def test_balanced_by_hand():
    """Costs 7, 6, 5, 4, 3 on two ranks: 7 | 6, then 5 to the rank with 6, 4 to the one with 7, and 3 to the lower of
    the two that stand at 11."""
    assert balanced([2, 3, 5, 7, 9], [7.0, 6.0, 5.0, 4.0, 3.0], [0, 1]) == {2: 0, 3: 1, 5: 1, 7: 0, 9: 0}
    assert balanced([4, 8], [1.0, 1.0], [1, 2, 3]) == {4: 1, 8: 2}  # ties: lower id first, lower rank first


def test_pinned():
    """A client's rank depends on neither the round nor who else takes part."""
    everyone = pinned(range(10), [1, 2, 3])
    assert everyone == {k: 1 + k % 3 for k in range(10)}
    assert pinned([2, 7], [1, 2, 3]) == {2: everyone[2], 7: everyone[7]}
