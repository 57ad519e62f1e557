"""The measured pace of ranks, and the placement of clients that follows it."""

from types import SimpleNamespace

import pytest

from fedmpi.engine.federation_config import FederationConfig
from fedmpi.engine.scheduler import MAX_AGE, MAX_PACE, ClientScheduler, RankSpeeds, balanced

SIZES = [40.0] * 12


def measured(rounds, seconds, ranks=(1, 2)):
    """Speeds after so many rounds of clients 0, 2, .. on the first rank, the others on the next.

    seconds: (t, rank) -> of one sample.
    """
    speeds, where = RankSpeeds(), {k: ranks[k % len(ranks)] for k in range(12)}
    for t in range(rounds):
        speeds.record(t, where, SIZES, [SIZES[k] * seconds(t, rank) for k, rank in where.items()])
    return speeds


@pytest.mark.parametrize(
    ("rounds", "seconds", "pace"),
    [
        (2, lambda t, r: 1e-3 * r, {}),  # of at least three rounds
        (3, lambda t, r: 1e-3 * r, {2: 200}),
        (3, lambda t, r: 1e-3 * (1 + 0.1 * r), {}),  # a tenth more
        (9, lambda t, r: 1e-3 * (50 if t == 7 else 1), {}),  # one hiccup
        (23, lambda t, r: 1e-3 * (2 if t >= 20 and r == 2 else 1), {2: 200}),  # a median
        (3, lambda t, r: 10.0 ** (6 * r), {2: MAX_PACE}),
    ],
)
def test_the_pace(rounds, seconds, pace):
    assert measured(rounds, seconds).pace(rounds) == pace


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_do_not_count(odd):
    speeds = RankSpeeds()
    for t in range(4):
        speeds.record(t, {0: 1, 1: 1, 2: 2}, [40, 40, 0], [0.04, odd, 1.0])
    assert speeds.costs == {1: pytest.approx([1e-3] * 4)}


def test_a_rank_without_clients_is_tried_again():
    speeds = measured(3, lambda t, r: 1e-3 * r)
    for t in range(3, MAX_AGE + 4):
        speeds.record(t, {0: 1}, [40], [0.04])
    assert [speeds.pace(MAX_AGE + t) for t in (2, 3)] == [{2: 200}, {}]


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


def run_rounds(it, first, last, seconds):
    """Make rounds as rank 0 does. seconds: (t, rank) -> of one sample."""
    for t in range(first, last):
        it.pace = it.choose_pace(t)
        where = it.assign(t)
        it.record_timings(t, where, [SIZES[k] * seconds(t, rank) for k, rank in where.items()])


def test_a_slow_rank_gets_less_and_a_lost_one_nothing_on_all_ranks_alike():
    it, other = scheduler(), scheduler(rank=2)
    run_rounds(it, 0, 3, lambda t, r: 3e-3 if r == 2 else 1e-3)
    assert it.pace == {}
    run_rounds(it, 3, 20, lambda t, r: 3e-3 if r == 2 else 1e-3)
    assert it.pace == {2: 300}
    where = list(it.assign(20).values())
    assert (where.count(1), where.count(2)) == (9, 3)
    other.pace = it.pace
    assert [other.assign(t) for t in range(9, 19)] == [it.assign(t) for t in range(9, 19)]
    it.comm.alive.remove(1)
    assert it.choose_pace(20) == {1: 0, 2: 300}


def test_pinned_stays_pinned():
    it = scheduler(placement="pinned")
    run_rounds(it, 0, 9, lambda t, r: 1e-3 * r)
    assert it.pace == {}
    assert it.assign(9) == {k: 1 + k % 2 for k in range(12)}
