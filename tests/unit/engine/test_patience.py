"""Ranks that are slower than expected but alive: the others wait for them."""

import time

import pytest
from helpers import FinishedRun, prepare, run_experiment, small_settings
from thread_ranks import run_in_threads

from fedmpi.comm.base import RankLostError
from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.faults import recovery
from fedmpi.engine.server import FederationServer

SIZE = 4
SLOW = {"evaluation": (Evaluator, "_evaluate_client"), "downloads": (FederationServer, "download")}


def short_run_config(method="fedavg", **comm):
    """Seven clients; rounds 1 and 3 are evaluated, so rounds 0 and 2 are short."""
    changes = {"evaluate": {"protocol": ["global", "personal"], "every": 2}, "comm": comm}
    return small_settings(method, "mlp", rounds=4, cohort={"fraction": 1.0}, faults={"on_lost_rank": "drop"}, **changes)


def make_slow(monkeypatch, what, seconds, patience_s=0.1):
    """Delay something from the second round on; return the rounds in which it began."""
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


def run_on_ranks(short_run_config):
    def one(it: FinishedRun) -> FinishedRun:
        it.recorded_failures, it.fed.reporter.callbacks.record_lost_ranks = (
            [],
            lambda row: it.recorded_failures.append(row),
        )
        it.reason = it.fed.run()
        return it

    return run_in_threads(SIZE, {}, lambda seat: prepare(short_run_config, comm=seat), one)


@pytest.mark.parametrize(("what", "method"), [("evaluation", "fedavg"), ("downloads", "fedfomo")])
def test_ranks_wait_for_a_slow_rank_that_is_alive(monkeypatch, what, method):
    """However long it takes: a warning is issued, no rank fails, and no work is repeated again and again."""
    calm = run_experiment(short_run_config(method))
    once = 2 * 7 if what == "evaluation" else 4 * 7
    began = make_slow(monkeypatch, what, 0.15)
    with pytest.warns(UserWarning, match=r"round \d: no rank has failed, but one was silent for \d"):
        runs = run_on_ranks(short_run_config(method))
    assert not [it for it in runs.values() if not isinstance(it, FinishedRun)], runs
    assert (runs[0].reason, runs[0].recorded_failures, runs[0].hashes) == ("finished", [], calm.hashes)
    assert len(began) < 10 * once


def test_round_timeout_limits_the_wait(monkeypatch):
    """A rank that exceeds comm.round_timeout_s each time ends the job, as it does without faults.on_lost_rank."""
    make_slow(monkeypatch, "evaluation", 0.8)
    with pytest.warns(UserWarning, match="no rank has failed"):
        runs = run_on_ranks(short_run_config(round_timeout_s=0.6))
    assert {type(error) for error in runs.values()} == {RankLostError}
    assert "within comm.round_timeout_s (0.6 s)" in str(runs[0])
