"""Divergence is reported once, in a warning and in metrics.jsonl; a run that learns is not reported."""

import json
import math
import warnings

import pytest
from helpers import run_experiment, settings

from fedmpi.engine.faults.divergence import DivergenceMonitor, LossTracker


def bad_rounds(losses, chance=None, from_chance=False):
    """Return the rounds in which a loss with these values is bad, as of the last round."""
    loss = LossTracker("loss", chance, best=chance if from_chance else math.inf)
    for t, value in enumerate(losses):
        loss.record(t, value)
    return loss.bad


GUESS = math.log(10)


@pytest.mark.parametrize(
    ("losses", "classes", "bad"),
    [
        ([2.0, 1.0, 9.0, 8.0], True, []),  # not ten times the best
        ([2.0, 0.1, 1.5, 1.6, 2.0], True, []),  # ten times the best, but better than guessing
        ([2.0, 0.1, 2.5, 2.6], True, [2, 3]),
        ([346.0], True, [0]),  # evaluations are compared with guessing from the first round on
        ([20.0, 21.0], True, []),
        ([2.0, 0.1, 30.0, 1.0, 30.0], True, [4]),  # only the latest consecutive rounds
        ([2.0, math.nan, math.inf], True, [1, 2]),
        ([5.0, 1.0, 11.0, 12.0], False, [2, 3]),
        ([50.0, 1.0, 11.0], False, []),  # less than the first value
        ([-1.0, -5.0, -0.1, 7.0], False, []),  # a negative loss is never ten times the best
    ],
)
def test_losses_far_above_their_best_are_bad(losses, classes, bad):
    assert bad_rounds(losses, GUESS if classes else None, from_chance=classes) == bad


def test_the_training_loss_is_compared_with_its_own_values():
    """It contains the method's own terms, so that the loss of uniform guessing is no reference."""
    assert bad_rounds([346.0, 340.0], GUESS) == []
    assert bad_rounds([346.0, 1.0, 11.0], GUESS) == [2]


def metrics_row(t, loss, **more):
    return {"round": t, "loss": loss, "cohort": [0], "refused": [], **more}


def test_divergence_is_reported_once_after_three_bad_rounds_or_at_the_end():
    monitor = DivergenceMonitor(10, "loss")
    assert [monitor.record(metrics_row(t, 99.0), last=False) for t in range(2)] == [None, None]
    with pytest.warns(
        UserWarning, match=r"diverged since round 0: loss is 99; the best value was 2\.3 for uniform guessing; lower"
    ):
        assert monitor.record(metrics_row(2, 99.0), last=False) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.record(metrics_row(3, 99.0), last=True) is None
    monitor = DivergenceMonitor(10, "loss")
    assert monitor.record(metrics_row(0, 0.01), last=False) is None
    with pytest.warns(
        UserWarning, match=r"diverged in round 1: loss is not finite; the best value was 0\.01 in round 0"
    ):
        assert monitor.record(metrics_row(1, math.nan), last=True) == 1


def test_rounds_without_evaluation_or_accepted_upload_do_not_count():
    monitor = DivergenceMonitor(10, "loss")
    rows = [metrics_row(0, 99.0), {"round": 1, "cohort": [0], "refused": []}, metrics_row(2, 99.0)]
    rows += [metrics_row(3, 99.0, refused=[{"client": 0}]), {"round": 4, "cohort": [0], "refused": []}]
    assert [monitor.record(row, last=False) for row in rows] == [None] * 5


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper", "fedld", "feddyn", "local"])
def test_runs_that_learn_are_not_reported(method):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        it = run_experiment(settings(method, rounds=8))
    assert not [w for w in caught if "diverged" in str(w.message)]
    assert not any("diverged" in row for row in it.rows)


def test_an_incomplete_global_model_is_not_monitored():
    it = run_experiment(settings("fedper", rounds=1))
    assert [loss.name for loss in it.fed.reporter.divergence.losses] == ["train_loss", "personal_loss"]
    assert [loss.name for loss in run_experiment(settings(rounds=1)).fed.reporter.divergence.losses] == [
        "train_loss",
        "loss",
    ]


def test_stop_ends_the_run_after_the_current_round():
    """On every rank; the model of this round is complete."""
    more = {"rounds": 40, "train": {"lr": 4.0, "momentum": 0.9}}
    with pytest.warns(UserWarning, match="diverged"):
        it = run_experiment(settings(**more, faults={"on_divergence": "stop"}))
    assert it.reason == "diverged"
    reported_in = next(row["round"] for row in it.rows if "diverged" in row)
    assert [row["round"] for row in it.rows] == list(range(reported_in + 2))
    assert it.rows[-1]["sha256"] == it.experiment.model.layout.sha256(it.w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on = run_experiment(settings(**{**more, "rounds": reported_in + 2}))
    assert on.reason == "finished"
    assert on.hashes == it.hashes


def test_a_resumed_run_is_monitored_anew_after_a_stop():
    monitor = DivergenceMonitor(10, "loss", stop=True)
    with pytest.warns(UserWarning, match="diverged"):
        assert [monitor.record(metrics_row(t, 99.0), last=False) for t in range(3)][-1] == 0
    assert monitor.should_stop
    again = DivergenceMonitor(10, "loss", stop=True)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert not again.should_stop
    with pytest.warns(UserWarning, match="diverged since round 2"):
        assert [again.record(metrics_row(t, 99.0), last=False) for t in (2, 3, 4)][-1] == 2
    assert again.should_stop
