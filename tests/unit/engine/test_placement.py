"""The measured pace of ranks, and the placement of clients that follows it."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from fedmpi.engine.federation_config import FederationConfig
from fedmpi.engine.scheduler import MAX_AGE, MAX_PACE, MIN_ROUNDS, ClientScheduler, RankSpeeds, balanced

SIZES = [40.0] * 12


def measured(rounds, seconds, ranks=(1, 2)):
    """Speeds after so many rounds of clients 0, 2, .. on the first rank, the others on the next.

    seconds: (t, rank) -> of one sample.
    """
    speeds, where = RankSpeeds(), {k: ranks[k % len(ranks)] for k in range(12)}
    for t in range(rounds):
        speeds.record(t, where, SIZES, [SIZES[k] * seconds(t, rank) for k, rank in where.items()])
    return speeds


def test_the_pace_is_a_median_of_at_least_three_rounds():
    assert measured(2, lambda t, r: 1e-3 * r).estimate(2) == ({}, 0.0)
    pace, sample_s = measured(3, lambda t, r: 1e-3 * r).estimate(3)
    assert (pace, sample_s) == ({1: 100, 2: 200}, pytest.approx(1e-3))
    assert measured(9, lambda t, r: 1e-3 * (50 if t == 7 else 1)).estimate(9)[0] == {1: 100, 2: 100}  # one hiccup
    assert measured(23, lambda t, r: 1e-3 * (2 if t >= 20 and r == 2 else 1)).estimate(23)[0] == {1: 100, 2: 200}


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_do_not_count(odd):
    speeds = RankSpeeds()
    for t in range(4):
        speeds.record(t, {0: 1, 1: 1, 2: 2}, [40, 40, 0], [0.04, odd, 1.0])
    assert speeds.estimate(4)[0] == {1: 100}
    assert measured(3, lambda t, r: 10.0 ** (6 * r)).estimate(3)[0][2] == MAX_PACE


def test_a_rank_without_clients_is_tried_again():
    speeds = measured(3, lambda t, r: 1e-3 * r)
    for t in range(3, MAX_AGE + 4):
        speeds.record(t, {0: 1}, [40], [0.04])
    assert speeds.estimate(MAX_AGE + 2)[0] == {1: 100, 2: 200}
    assert speeds.estimate(MAX_AGE + 3)[0] == {1: 100}


def test_by_pace_each_goes_to_the_rank_that_would_finish_it_first():
    """Costs 6, 5, 4, 3 on a rank and on one of twice its pace: 6 | then 5 would end at 11 or 10, 4 at 10 or 18, 3 at 13
    or 16."""
    assert balanced([1, 2, 3, 4], [6.0, 5.0, 4.0, 3.0], [0, 1], {0: 100, 1: 200}) == {1: 0, 2: 1, 3: 0, 4: 0}


# ---- what is decided ----
def scheduler(rank=0, ranks=(1, 2), placement="balanced"):
    data = SimpleNamespace(clients=12, train_sizes=SIZES, global_test=[0])
    comm = SimpleNamespace(rank=rank, alive=sorted({0, *ranks}))
    config = FederationConfig(100, 0, lambda t: 0.1, placement=placement)
    return ClientScheduler(config, data, comm, list(ranks))


def run_rounds(it, first, last, seconds, evaluated_s=0.0):
    """Make rounds as rank 0 does; return the rows of placement.jsonl. seconds: (t, rank) -> of one sample."""
    rows = []
    for t in range(first, last):
        row = it.commit(t)
        rows += [row] if row else []
        it.consider_rebalancing(t + 1, evaluated_s)
        where = it.assign(t)
        it.record_timings(t, where, [SIZES[k] * seconds(t, rank) for k, rank in where.items()])
    return rows


def shares(it, t):
    where = it.assign(t)
    return [list(where.values()).count(rank) for rank in it.ranks]


def test_a_slow_rank_gets_less_on_all_ranks_alike():
    it, other = scheduler(), scheduler(rank=2)
    rows = run_rounds(it, 0, 20, lambda t, r: 3e-3 if r == 2 else 1e-3)
    assert rows == [{"round": 0, "pace": {"1": 100, "2": 100}}, {"round": 4, "pace": {"1": 100, "2": 300}}]
    assert shares(it, 20) == [9, 3]
    other.pace = it.pace
    assert [other.assign(t) for t in range(9, 19)] == [it.assign(t) for t in range(9, 19)]


def test_a_server_that_evaluates_before_it_trains_gets_less():
    """0.16 s of evaluation are four clients: 4 at rank 0 and 8 at rank 1 end together."""
    it = scheduler(ranks=(0, 1))
    run_rounds(it, 0, 20, lambda t, r: 1e-3, evaluated_s=0.16)
    assert shares(it, 20) == [4, 8]


def test_changes_keep_their_distance():
    rows = run_rounds(scheduler(), 0, 60, lambda t, r: 1e-3 * (3 if (t // 4) % 2 == r % 2 else 1))
    starts = [row["round"] for row in rows[1:]]
    assert len(starts) > 3  # it does follow
    assert all(b - a >= MIN_ROUNDS for a, b in pairwise(starts))


def test_pinned_stays_pinned():
    it = scheduler(placement="pinned")
    assert len(run_rounds(it, 0, 9, lambda t, r: 1e-3 * r)) == 1
    assert it.assign(9) == {k: 1 + k % 2 for k in range(12)}


def test_it_is_resumed_on_the_same_ranks_alone():
    it, again, elsewhere = scheduler(), scheduler(), scheduler(ranks=(1, 2, 3))
    run_rounds(it, 0, 6, lambda t, r: 1e-3 * r)
    memory = json.loads(json.dumps(it.memory()))
    again.recall(memory)
    again.recorded = it.recorded
    assert run_rounds(again, 6, 12, lambda t, r: 1e-3 * r) == run_rounds(it, 6, 12, lambda t, r: 1e-3 * r) == []
    assert again.pace == it.pace != {}
    elsewhere.recall(memory)
    assert elsewhere.planned_pace == {}


def test_a_replay_places_as_the_run_did():
    it = scheduler(ranks=(1, 2, 3))
    rows = run_rounds(it, 0, 8, lambda t, r: 1e-3 * r)
    it.comm.alive.remove(2)
    rows += run_rounds(it, 8, 12, lambda t, r: 1e-3 * r)
    assert [row["pace"]["2"] for row in rows] == [100, 200, 0]
    again = scheduler(ranks=(1, 2, 3))
    again.replayed_rows = rows
    assert run_rounds(again, 0, 12, lambda t, r: 1e-3) == rows  # whatever it would measure
    assert 2 not in again.assign(11).values()
    assert again.assign(11) == it.assign(11)
