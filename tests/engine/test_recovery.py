"""A rank may die at any of its messages: the others go on, and the numbers are those that faults.jsonl defines."""

from dataclasses import replace

import pytest
from hall import Seat, play_in_threads
from helpers import Play, digest, prepare, trial

from fedmpi.engine.faults.losses import Losses

ROUNDS = 5


def make(config):
    def on(seat: Seat) -> Play:
        it = prepare(config, comm=seat)
        it.told, it.fed.sink.loss = [], lambda row: it.told.append(row)
        return it

    return on


def run(it: Play) -> Play:
    it.reason = it.fed.run()
    return it


def with_deaths(config, size, dies):
    """Rank 0's run; every other living rank has come to its end, too."""
    done = play_in_threads(size, dies, make(config), run)
    assert set(done) == set(range(size)) - set(dies)
    assert all(isinstance(each, Play) for each in done.values()), done
    assert (done[0].reason, len(done[0].rows)) == ("finished", config.rounds)
    return done[0]


def lossy(method, **changes):
    return trial(method, "mlp", rounds=ROUNDS, **{"faults": {"on_lost_rank": "drop"}, **changes})


def replayed(config, rows) -> Play:
    """The run without faults that is given the losses of another."""
    it = prepare(config)
    it.fed.roster.losses, it.fed.plan = Losses(rows), replace(it.fed.plan, replay=True)
    return run(it)


def undisturbed(config, size):
    """Such a run, and how many messages each rank has in it."""
    done = play_in_threads(size, {}, make(config), run)
    return done[0], {rank: it.fed.comm.count for rank, it in done.items()}


@pytest.mark.parametrize("policy", ["drop", "redo"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper"])
@pytest.mark.parametrize("placement", ["balanced", "pinned"])
def test_at_every_message(method, policy, placement):
    config = lossy(method, faults={"on_lost_rank": policy}, cohort={"placement": placement, "fraction": 0.6})
    size, stateless = 4, method == "fedavg"
    quiet, counts = undisturbed(config, size)
    for rank in range(1, size):
        for number in range(1, counts[rank] + 1):
            it = with_deaths(config, size, {rank: [number]})
            if policy == "redo" and stateless:
                assert it.hashes == quiet.hashes, (rank, number)
            again = replayed(config, it.fed.roster.losses.rows)
            assert it.hashes == again.hashes, (rank, number, it.fed.roster.losses.rows)
            assert digest(it.b) == digest(again.b)
