"""What ranks are thought to take: bounded, finite, unmoved by a hiccup; and what clients are placed by."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from fedmpi.engine.cost_model import MAX_AGE, MAX_CLIENT_COST, MAX_RANK_COST, MIN_ROUNDS, CostModel, SpeedEstimator
from fedmpi.engine.federation_config import FederationConfig
from fedmpi.engine.scheduler import ClientScheduler, balanced

SIZES = [40] * 12


def seen(rounds, seconds, ranks=(1, 2), members=range(12)):
    """What is known after so many rounds in which clients 0, 2, .. were on the first rank, the others on the next.

    seconds: (t, client, rank) -> of one sample.
    """
    estimator, where = SpeedEstimator(), {k: ranks[k % len(ranks)] for k in members}
    for t in range(rounds):
        costs = [(SIZES[k], SIZES[k] * seconds(t, k, where[k])) for k in members]
        estimator.record(t, list(members), where, costs)
    return estimator


def test_a_slow_rank_is_found_after_three_rounds():
    slow = {1: 1e-3, 2: 3e-3}
    assert seen(2, lambda t, k, r: slow[r]).estimate(2, SIZES, CostModel()) is None
    assert seen(3, lambda t, k, r: slow[r]).estimate(3, SIZES, CostModel()).row() == {
        "pace": {"1": 100, "2": 300}, "clients": {}, "ahead": 0,
    }  # fmt: skip


def test_a_rank_that_has_become_slow_is_found_within_three_rounds():
    estimator = seen(20 + 3, lambda t, k, r: 1e-3 * (2 if t >= 20 and r == 2 else 1))
    assert estimator.estimate(23, SIZES, CostModel()).ranks == {1: 100, 2: 200}


def test_a_dear_client_is_told_from_a_slow_rank():
    estimator = seen(5, lambda t, k, r: 1e-3 * (4 if k == 5 else 1) * (2 if r == 2 else 1))
    assert estimator.estimate(5, SIZES, CostModel()) == CostModel({1: 100, 2: 200}, {5: 400})


def test_what_is_known_of_a_client_stands_until_it_is_measured_again():
    estimator = seen(5, lambda t, k, r: 1e-3, members=range(6))
    assert estimator.estimate(5, SIZES, CostModel({}, {3: 300, 9: 300})).clients == {9: 300}


@pytest.mark.parametrize("seed", range(20))
def test_estimates_are_whole_bounded_and_the_same_from_json(seed):
    rng = random.Random(seed)
    odd = [0.0, -1.0, math.nan, math.inf, 1e-30, 1e30, 1.0, 2.0]
    estimator = SpeedEstimator()
    for t in range(8):
        members = rng.sample(range(12), 6)
        where = {k: rng.randint(0, 3) for k in members}
        estimator.record(t, members, where, [(rng.choice([0, 1, 50]), rng.choice(odd)) for _ in members])
        estimator.record_evaluation(rng.choice([0.0, 1e9]))
    costs = estimator.estimate(8, SIZES, CostModel())
    if costs is None:
        return
    assert all(isinstance(x, int) and 100 <= x <= MAX_RANK_COST for x in costs.ranks.values())
    assert all(isinstance(x, int) and 1 <= x <= MAX_CLIENT_COST for x in costs.clients.values())
    assert isinstance(costs.evaluation, int)
    assert CostModel.from_row(json.loads(json.dumps(costs.row()))) == costs


def test_a_rank_of_which_nothing_is_seen_is_tried_again():
    estimator = seen(3, lambda t, k, r: 1e-3 * r)
    for t in range(3, MAX_AGE + 4):
        estimator.record(t, [0], {0: 1}, [(40, 0.04)])
    assert estimator.estimate(MAX_AGE + 2, SIZES, CostModel()).ranks == {1: 100, 2: 200}
    assert estimator.estimate(MAX_AGE + 3, SIZES, CostModel()).ranks == {1: 100}


def test_by_pace_each_goes_to_the_rank_that_would_finish_it_first():
    """Costs 6, 5, 4, 3 on a rank and on one of twice its pace: 6 | then 5 would end at 11 or 10, 4 at 10 or 18, 3 at 13
    or 16."""
    assert balanced([1, 2, 3, 4], [6.0, 5.0, 4.0, 3.0], [0, 1], {0: 1, 1: 2}) == {1: 0, 2: 1, 3: 0, 4: 0}
    assert balanced([1, 2], [5.0, 5.0], [0, 1], None, {0: 4.0}) == {1: 1, 2: 0}


# ---- what is decided ----
def scheduler(rank=0, ranks=(1, 2), placement="balanced", **config):
    data = SimpleNamespace(clients=12, train_sizes=SIZES, global_test=[0])
    comm = SimpleNamespace(rank=rank, alive=[0, *ranks])
    return ClientScheduler(
        FederationConfig(100, 0, lambda t: 0.1, placement=placement, **config), data, comm, list(ranks)
    )


def rounds(it, first, last, seconds):
    """Rounds as rank 0 has them: the lines of placement.jsonl."""
    told = []
    for t in range(first, last):
        row = it.commit(t)
        told += [row] if row else []
        it.consider_rebalancing(t + 1)
        members, where = it.cohort(t), it.assign(t)
        it.record_timings(t, members, where, [SIZES[k] * seconds(t, k, where[k]) for k in members])
    return told


def shares(it, t):
    where = it.assign(t)
    return [list(where.values()).count(rank) for rank in it.ranks]


def test_a_slow_rank_gets_less_and_it_is_told_once():
    it = scheduler()
    told = rounds(it, 0, 20, lambda t, k, r: 3e-3 if r == 2 else 1e-3)
    assert [row["round"] for row in told] == [0, 4]
    assert told[1] == {"round": 4, "pace": {"1": 100, "2": 300}, "clients": {}, "ahead": 0}
    assert shares(it, 20) == [9, 3]


def test_changes_keep_their_distance():
    it = scheduler()
    told = rounds(it, 0, 60, lambda t, k, r: 1e-3 * (3 if (t // 4) % 2 == r % 2 else 1))
    starts = [row["round"] for row in told[1:]]
    assert len(starts) > 3  # it does follow
    assert all(b - a >= MIN_ROUNDS for a, b in pairwise(starts))


def test_all_ranks_place_alike_by_what_is_told():
    it, other = scheduler(), scheduler(rank=2)
    rounds(it, 0, 9, lambda t, k, r: 1e-3 * (1 + 2 * (r == 2) + 3 * (k == 4)))
    other.costs = CostModel.from_row(json.loads(json.dumps(it.costs.row())))
    assert it.costs.ranks[2] == 300
    assert [other.assign(t) for t in range(9, 19)] == [it.assign(t) for t in range(9, 19)]


def test_pinned_stays_pinned():
    it = scheduler(placement="pinned")
    assert len(rounds(it, 0, 9, lambda t, k, r: 1e-3 * r)) == 1
    assert it.assign(9) == {k: 1 + k % 2 for k in range(12)}


def test_it_goes_on_as_it_was_on_the_same_ranks_alone():
    seconds = lambda t, k, r: 1e-3 * r  # noqa: E731
    it, again, elsewhere = scheduler(), scheduler(), scheduler(ranks=(1, 2, 3))
    rounds(it, 0, 6, seconds)
    memory = json.loads(json.dumps(it.memory()))
    again.recall(memory)
    again.recorded = it.recorded
    assert rounds(again, 6, 12, seconds) == rounds(it, 6, 12, seconds) == []
    assert again.costs == it.costs != CostModel()
    elsewhere.recall(memory)
    assert elsewhere.planned_costs == CostModel()


def test_a_run_that_is_given_places_as_it_was_placed():
    it = scheduler(ranks=(1, 2, 3))
    told = rounds(it, 0, 8, lambda t, k, r: 1e-3 * r)
    it.comm.alive.remove(2)
    told += rounds(it, 8, 12, lambda t, k, r: 1e-3 * r)
    assert [row["pace"]["2"] for row in told] == [100, 200, 0]
    again = scheduler(ranks=(1, 2, 3))
    again.replayed_rows = told
    assert rounds(again, 0, 12, lambda t, k, r: 1e-3) == told  # whatever it would estimator
    assert 2 not in again.assign(11).values()
    assert again.assign(11) == it.assign(11)
