"""Sampling of cohorts and assignment of clients to ranks, by sizes and measured relative costs."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, fedmpi, prepare, settings

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.engine.federation_config import FederationConfig
from fedmpi.engine.scheduler import (
    MAX_AGE,
    MAX_COST,
    ClientScheduler,
    RankSpeeds,
    assign_balanced,
    assign_pinned,
    cohort_size,
    draw_cohort,
)


# ---- cohorts ----
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
def test_each_cycle_contains_each_client_once(clients, fraction, rounds):
    """In a new order in each cycle; the last round of a cycle takes the remaining clients."""
    drawn = [draw_cohort(3, t, clients, fraction, "cyclic") for t in range(40 * rounds)]
    cycles = [drawn[at : at + rounds] for at in range(0, len(drawn), rounds)]
    for cycle in cycles:
        assert sorted(k for members in cycle for k in members) == list(range(clients))
        assert {len(members) for members in cycle[:-1]} <= {cohort_size(clients, fraction)}
    assert rounds == 1 or len({str(cycle) for cycle in cycles}) > 10
    assert rounds == 1 or len({tuple(cycle[0]) for cycle in cycles}) > 1


@pytest.mark.parametrize(("clients", "fraction", "m"), [(7, 0.01, 1), (10, 0.3, 3), (10, 1.0, 10), (100, 0.29, 29)])
@pytest.mark.parametrize("draw", ["uniform", "cyclic"])
def test_size_of_a_cohort(clients, fraction, m, draw):
    """max(floor(fraction N), 1), as with `cohort.size: m`; 0.29 * 100 gives 29, and not 28 as in floating point."""
    for t in range(5):
        one = draw_cohort(3, t, clients, fraction, draw)
        assert draw_cohort(3, t, clients, None, draw, m) == one
        assert draw == "cyclic" or len(one) == m


def load_cohort(tmp_path, cohort, *overrides):
    path = tmp_path / "run.yaml"
    data = "data: {source: digits, partition: {scheme: iid, clients: 20}}"
    path.write_text(f"{data}\nmodel: {{name: mlp}}\nmethod: {{name: fedavg}}\ncohort: {cohort}\n")
    return config.load(path, overrides)


def test_fraction_and_size_exclude_each_other(tmp_path):
    assert (load_cohort(tmp_path, "{}").cohort.fraction, load_cohort(tmp_path, "{}").cohort.size) == (1.0, None)
    sized = load_cohort(tmp_path, "{size: 5}").cohort
    assert (sized.fraction, sized.size) == (None, 5)
    for cohort, overrides in (("{size: 5, fraction: 0.5}", []), ("{fraction: 0.5}", ["cohort.size=5"])):
        with pytest.raises(
            UserError, match=r"size: 5 is not allowed together with cohort\.fraction: 0\.5; set one of them to null"
        ):
            load_cohort(tmp_path, cohort, *overrides)
    both = load_cohort(tmp_path, "{fraction: 0.5}", "cohort.size=5", "cohort.fraction=null").cohort
    assert (both.fraction, both.size) == (None, 5)
    with pytest.raises(UserError, match="neither size nor fraction is set"):
        load_cohort(tmp_path, "{fraction: null}")
    for wrong in ("0", "-1", "2.5", "all"):
        with pytest.raises(UserError, match=r"cohort\.size: .* is not allowed"):
            load_cohort(tmp_path, f"{{size: {wrong}}}")


def test_a_cohort_larger_than_the_number_of_clients_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"cohort\.size: 8 clients per round, but there are only 7; set it to at most 7"
    ):
        prepare(settings(cohort={"fraction": None, "size": 8}))
    prepare(settings(cohort={"fraction": None, "size": 7}))
    process = fedmpi("validate", ROOT / "configs/quickstart.yaml", "cohort.fraction=null", "cohort.size=5")
    assert process.returncode == 2
    assert "command line: cohort.size: 5 clients per round, but there are only 4" in process.stderr
    assert "Traceback" not in process.stderr


# ---- placement ----
@pytest.mark.parametrize("seed", range(12))
def test_assign_balanced_is_within_a_third_of_the_optimum(seed):
    """Graham 1969: the longest time is at most 4/3 - 1/(3 W) of the optimum, which is found by trying everything."""
    rng = np.random.default_rng(seed)
    ranks, costs = [1, 2, 3], rng.integers(1, 30, 7).astype(float).tolist()
    members = sorted(rng.choice(40, 7, replace=False).tolist())
    where = assign_balanced(members, costs, ranks)

    def longest(places):
        return max(sum(c for c, r in zip(costs, places, strict=True) if r == rank) for rank in ranks)

    best = min(longest(places) for places in product(ranks, repeat=7))
    assert longest([where[k] for k in members]) <= best * (4 / 3 - 1 / 9) + 1e-9
    assert list(where) == members


def test_assign_balanced_has_the_result_computed_by_hand():
    """Costs 7, 6, 5, 4, 3 on two ranks: first 7 | 6, then 5 to the rank with 6, and 4 to the rank with 7.

    Both ranks then have 11, and 3 goes to the one with the lower number.
    """
    assert assign_balanced([2, 3, 5, 7, 9], [7.0, 6.0, 5.0, 4.0, 3.0], [0, 1]) == {2: 0, 3: 1, 5: 1, 7: 0, 9: 0}
    assert assign_balanced([4, 8], [1.0, 1.0], [1, 2, 3]) == {4: 1, 8: 2}  # ties: lower id first, lower rank first


def test_assign_pinned_depends_only_on_the_client():
    """Not on the round, and not on the other clients that take part."""
    everyone = assign_pinned(range(10), [1, 2, 3])
    assert everyone == {k: 1 + k % 3 for k in range(10)}
    assert assign_pinned([2, 7], [1, 2, 3]) == {2: everyone[2], 7: everyone[7]}


SIZES = [40.0] * 12


def measure_speeds(rounds, seconds, ranks=(1, 2)):
    """Return the measured speeds after rounds with clients 0, 2, ... on the first rank and the others on the next.

    seconds: (t, rank) -> seconds per sample.
    """
    speeds, where = RankSpeeds(), {k: ranks[k % len(ranks)] for k in range(12)}
    for t in range(rounds):
        speeds.record(t, where, SIZES, [SIZES[k] * seconds(t, rank) for k, rank in where.items()])
    return speeds


@pytest.mark.parametrize(
    ("rounds", "seconds", "costs"),
    [
        (2, lambda t, r: 1e-3 * r, {}),  # at least three rounds are needed
        (3, lambda t, r: 1e-3 * r, {2: 200}),
        (3, lambda t, r: 1e-3 * (1 + 0.1 * r), {}),  # a difference of a tenth is ignored
        (9, lambda t, r: 1e-3 * (50 if t == 7 else 1), {}),  # a single slow round is ignored
        (23, lambda t, r: 1e-3 * (2 if t >= 20 and r == 2 else 1), {2: 200}),  # three of five rounds decide
        (3, lambda t, r: 10.0 ** (6 * r), {2: MAX_COST}),
    ],
)
def test_relative_costs_follow_from_measured_seconds(rounds, seconds, costs):
    assert measure_speeds(rounds, seconds).relative_costs(rounds) == costs


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_seconds_are_ignored(odd):
    speeds = RankSpeeds()
    for t in range(4):
        speeds.record(t, {0: 1, 1: 1, 2: 2}, [40, 40, 0], [0.04, odd, 1.0])
    assert speeds.seconds_per_sample == {1: pytest.approx([1e-3] * 4)}


def test_a_rank_without_clients_is_regarded_as_fast_again():
    speeds = measure_speeds(3, lambda t, r: 1e-3 * r)
    for t in range(3, MAX_AGE + 4):
        speeds.record(t, {0: 1}, [40], [0.04])
    assert [speeds.relative_costs(MAX_AGE + t) for t in (2, 3)] == [{2: 200}, {}]


def test_relative_costs_decide_which_rank_would_finish_first():
    """Costs 6, 5, 4, 3 on one rank and on one with twice its relative cost.

    After 6, client 5 would end at 11 or 10, client 4 at 10 or 18, and client 3 at 13 or 16.
    """
    assert assign_balanced([1, 2, 3, 4], [6.0, 5.0, 4.0, 3.0], [0, 1], {0: 100, 1: 200}) == {1: 0, 2: 1, 3: 0, 4: 0}


# ---- decisions of rank 0 ----
def make_scheduler(rank=0, ranks=(1, 2), placement="balanced"):
    data = SimpleNamespace(clients=12, train_sizes=SIZES, global_test=[0])
    comm = SimpleNamespace(rank=rank, alive=sorted({0, *ranks}))
    config = FederationConfig(100, 0, lambda t: 0.1, placement=placement)
    return ClientScheduler(config, data, comm, list(ranks))


def run_rounds(it, first, last, seconds):
    """Run rounds as rank 0 does; seconds: (t, rank) -> seconds per sample."""
    for t in range(first, last):
        it.rank_costs = it.choose_rank_costs(t)
        where = it.assign_clients(t)
        it.record_timings(t, where, [SIZES[k] * seconds(t, rank) for k, rank in where.items()])


def test_a_slow_rank_gets_fewer_clients_and_a_failed_one_none():
    it, other = make_scheduler(), make_scheduler(rank=2)
    run_rounds(it, 0, 3, lambda t, r: 3e-3 if r == 2 else 1e-3)
    assert it.rank_costs == {}
    run_rounds(it, 3, 20, lambda t, r: 3e-3 if r == 2 else 1e-3)
    assert it.rank_costs == {2: 300}
    where = list(it.assign_clients(20).values())
    assert (where.count(1), where.count(2)) == (9, 3)
    other.rank_costs = it.rank_costs
    assert [other.assign_clients(t) for t in range(9, 19)] == [it.assign_clients(t) for t in range(9, 19)]
    it.comm.alive.remove(1)
    assert it.choose_rank_costs(20) == {1: 0, 2: 300}


def test_pinned_placement_ignores_measurements():
    it = make_scheduler(placement="pinned")
    run_rounds(it, 0, 9, lambda t, r: 1e-3 * r)
    assert it.rank_costs == {}
    assert it.assign_clients(9) == {k: 1 + k % 2 for k in range(12)}
