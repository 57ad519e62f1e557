"""Ranks that take longer than the patience of the others, and live: they are waited for."""

import time

import pytest
from helpers import FinishedRun, play, prepare, small_settings
from thread_ranks import play_in_threads

from fedmpi.comm.base import RankLostError
from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.faults import recovery
from fedmpi.engine.server import FederationServer

SIZE = 4
SLOW = {"evaluation": (Evaluator, "_evaluate_client"), "downloads": (FederationServer, "download")}


def config(method="fedavg", **comm):
    """Seven clients, evaluated after rounds 1 and 3: rounds 0 and 2 are short."""
    changes = {"evaluate": {"protocol": ["global", "personal"], "every": 2}, "comm": comm}
    return small_settings(method, "mlp", rounds=4, cohort={"fraction": 1.0}, faults={"on_lost_rank": "drop"}, **changes)


def slow(monkeypatch, what, seconds, patience_s=0.1):
    """From the second round on."""
    (owner, name), began = SLOW[what], []
    plain = getattr(owner, name)

    def slowly(self, t, *more):
        began.append(t)
        time.sleep(seconds if what == "evaluation" or t > 0 else 0)
        return plain(self, t, *more)

    monkeypatch.setattr(owner, name, slowly)
    monkeypatch.setattr(recovery, "MIN_PATIENCE_S", patience_s)
    monkeypatch.setattr(recovery, "PATIENCE_ROUNDS", 1.5)
    return began


def ran(config):
    def one(it: FinishedRun) -> FinishedRun:
        it.told, it.fed.reporter.callbacks.record_lost_ranks = [], lambda row: it.told.append(row)
        it.reason = it.fed.run()
        return it

    return play_in_threads(SIZE, {}, lambda seat: prepare(config, comm=seat), one)


@pytest.mark.parametrize(("what", "method"), [("evaluation", "fedavg"), ("downloads", "fedfomo")])
def test_who_is_slow_and_lives_is_waited_for(monkeypatch, what, method):
    """However long that takes; it is reported, and nobody is lost. Nothing is done again and again."""
    calm = play(config(method))
    once = 2 * 7 if what == "evaluation" else 4 * 7
    began = slow(monkeypatch, what, 0.15)
    with pytest.warns(UserWarning, match=r"round \d: no rank has failed, but one was silent for \d"):
        done = ran(config(method))
    assert not [it for it in done.values() if not isinstance(it, FinishedRun)], done
    assert (done[0].reason, done[0].told, done[0].hashes) == ("finished", [], calm.hashes)
    assert len(began) < 10 * once


def test_round_timeout_bounds_it(monkeypatch):
    """A rank that is late after comm.round_timeout_s each time ends the job, as it does without faults.on_lost_rank."""
    slow(monkeypatch, "evaluation", 0.8)
    with pytest.warns(UserWarning, match="no rank has failed"):
        done = ran(config(round_timeout_s=0.6))
    assert {type(error) for error in done.values()} == {RankLostError}
    assert "within 0.6 s (comm.round_timeout_s)" in str(done[0])
