"""Selection of the best model by a validation metric (evaluate.best), and early stopping."""

import json
import math

import pytest
import torch
from helpers import fedmpi, run_experiment, settings
from safetensors import safe_open
from torch.nn.functional import cross_entropy

import fedmpi as api
from fedmpi.engine.model_selection import BestModel, SelectionCriterion

VALIDATED = {"data": {"validation": 0.3}, "rounds": 12, "train": {"lr": 0.3}}


def config_with_best(config_of_best, method="fedavg", net="mlp", **more):
    return settings(method, net, **{**VALIDATED, "evaluate": {"best": config_of_best}, **more})


def best_rounds(values, **how):
    """Return the rounds whose models were the best so far, and the round after which the run stopped early."""
    selection, w = (
        BestModel(SelectionCriterion("x", **{"lower_is_better": False, **how}), torch.zeros(1), torch.zeros(0)),
        torch.zeros(1),
    )
    rounds = []
    for t, value in enumerate(values):
        if selection.update(t, value, w + t, w[:0]):
            rounds.append(t)
            assert (selection.round, selection.value, float(selection.w)) == (t, value, t)
        assert not selection.update(t, 1e9, w, w[:0])  # a round that was evaluated before
        if selection.should_stop():
            return rounds, t
    return rounds, None


def test_comparison_of_models_by_the_criterion():
    assert best_rounds([1, 3, 2, 3, 4]) == ([0, 1, 4], None)
    assert best_rounds([1, 3, 2, 3, 4], lower_is_better=True) == ([0], None)
    assert best_rounds([5, 4, 4, 3, 6], lower_is_better=True) == ([0, 1, 3], None)
    assert best_rounds([1, 3, 2, 3, 4], patience=2) == ([0, 1], 3)
    assert best_rounds([1, 3, 2, 4, 3, 3, 9], patience=2) == ([0, 1, 3], 5)
    assert best_rounds([1, 1.5, 2, 2.5, 3], min_delta=1.0) == ([0, 3], None)
    assert best_rounds([1, 1.5, 2, 2.5, 3], min_delta=1.0, patience=2) == ([0], 2)
    assert best_rounds([math.nan, math.nan, 1], patience=2) == ([], 1)
    assert best_rounds([math.nan, 2, math.nan, 3]) == ([1, 3], None)


def validate_by_hand(it, w, shards):
    """Return loss and accuracy of w on the rows of some shards, computed by hand."""
    it.experiment.model.load(w, it.b)
    module = it.experiment.net.module.eval()
    x, y = (torch.cat([getattr(s, name)[s.index] for s in shards]) for name in "xy")
    logits = module(x)
    return cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).double().mean().item()


def test_the_metric_is_that_of_the_global_model_on_all_validation_rows():
    it = run_experiment(config_with_best("loss", net="norm"))
    data = it.experiment.data
    assert set(data.validation) == set(range(7))
    loss, accuracy = validate_by_hand(it, it.w, [data.validation[k] for k in data.validation])
    assert it.rows[-1]["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert it.rows[-1]["validation_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_best_model_is_that_of_the_best_round_and_selection_changes_no_bits(metric):
    it, plain = run_experiment(config_with_best(metric)), run_experiment(settings("fedavg", "mlp", **VALIDATED))
    assert it.hashes == plain.hashes
    values = [row[f"validation_{metric}"] for row in it.rows]
    t = values.index(min(values) if metric == "loss" else max(values))
    best_model = it.fed.server.best
    assert (best_model.round, best_model.value) == (t, values[t])
    assert it.experiment.model.layout.sha256(best_model.w) == it.hashes[t]


def test_a_run_stops_early_when_patience_is_exhausted():
    """The round that is in progress at the last evaluation becomes the last one, and is evaluated as such."""
    # accuracy rises, so the first model remains the best one
    plain = run_experiment(config_with_best({"metric": "accuracy", "goal": "lowest"}))
    it = run_experiment(config_with_best({"metric": "accuracy", "goal": "lowest", "patience": 3}))
    assert (plain.reason, it.reason) == ("finished", "early_stopped")
    first = it.fed.server.best.round
    assert len(it.rows) == first + 3 + 2 < len(plain.rows)
    assert it.hashes == plain.hashes[: len(it.rows)]
    assert "validation_accuracy" in it.rows[-1]
    assert it.fed.server.best.stop_reason.startswith(
        "validation_accuracy has not become lower in 3 evaluations; best: "
    )
    every = run_experiment(
        config_with_best(
            {"metric": "accuracy", "goal": "lowest", "patience": 3},
            evaluate={"every": 2, "best": {"metric": "accuracy", "goal": "lowest", "patience": 3}},
        )
    )
    assert len(every.rows) > len(it.rows)  # patience counts evaluations, not rounds


# ---- a run directory ----
@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    (folder / "run.yaml").write_text(
        f"""
rounds: 30
output: {folder}
data: {{source: digits, partition: {{scheme: iid, clients: 4}}, validation: 0.2}}
model: {{name: mlp, hidden: [16]}}
method: {{name: fedavg}}
train: {{lr: 0.2}}
evaluate: {{best: {{metric: accuracy, goal: lowest, patience: 2}}}}
"""
    )
    process = fedmpi("run", folder / "run.yaml")
    assert process.returncode == 0, process.stderr
    return folder, process


def test_files_of_a_run_that_stopped_early(stopped_run):
    folder, process = stopped_run
    place = folder / "run"
    summary = json.loads((place / "summary.json").read_text())
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    values = [row["validation_accuracy"] for row in rows]
    t = values.index(min(values))
    expected = {"file": "model-best.safetensors", "metric": "validation_accuracy", "round": t, "value": values[t]}
    assert summary["best_model"] == expected
    assert summary["exit_reason"].startswith("early_stopped: validation_accuracy has not become lower in ")
    assert len(rows) == summary["rounds"] < 30
    assert f"stopped early ({summary['exit_reason']}): {len(rows)} of 30 rounds are complete" in process.stdout
    assert f"best model: {values[t]:.2f} validation_accuracy in round {t} (model-best.safetensors)" in process.stdout
    with safe_open(place / "model-best.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["fedmpi"])["round"] == t
    module, final = api.load(place, best=True), api.load(place)
    assert not torch.equal(next(iter(module.parameters())), next(iter(final.parameters())))


def test_a_stopped_run_can_be_resumed_with_more_patience(stopped_run):
    folder, _ = stopped_run
    place = folder / "run"
    before = (place / "model-best.safetensors").read_bytes()
    process = fedmpi("resume", place)
    assert process.returncode == 0, process.stderr
    assert (place / "model-best.safetensors").read_bytes() == before
    rows = len((place / "metrics.jsonl").read_text().splitlines())
    process = fedmpi("resume", place, "evaluate.best.patience=100", f"rounds={rows + 3}")
    assert process.returncode == 0, process.stderr
    summary = json.loads((place / "summary.json").read_text())
    assert (summary["exit_reason"], summary["rounds"]) == ("finished", rows + 3)
