"""`fedmpi sweep`: bits as in single runs, no repeated training, failures, tuning, and validation."""

import json
import os
import re

import pytest
from helpers import SMALL_SWEEP, fedmpi

from fedmpi.runtime.record import lock


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(SMALL_SWEEP)
    return path


@pytest.fixture
def run(file, tmp_path):
    """Return a function that runs a command on the sweep, checks its exit code, and returns its output."""

    def call(command, *words, code=0):
        process = fedmpi(command, file, *words, cwd=tmp_path)
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout + process.stderr

    return call


def hashes(run):
    return [json.loads(line)["sha256"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_runs_have_the_bits_of_single_runs_and_only_missing_runs_train(run, tmp_path):
    runs = tmp_path / "runs" / "few"
    *lines, after = run("sweep").splitlines()
    assert lines[0] == "4 runs in runs/few"
    assert after == "next: fedmpi table runs/few; fedmpi report runs/few"
    assert [line.partition("]")[0] for line in lines[1:]] == [f"[{i}/4" for i in range(1, 5)]
    assert all(": accuracy " in line for line in lines[1:])
    names = sorted(path.name for path in runs.iterdir())
    assert names == ["fedavg_seed-0", "fedavg_seed-1", "fedprox_seed-0", "fedprox_seed-1", "sweep.json"]
    (tmp_path / "one.yaml").write_text(SMALL_SWEEP.partition("grid:")[0] + "seed: 1\n")
    single_run = fedmpi("run", "one.yaml", "method={name: fedprox, mu: 0.1}", "name=one", cwd=tmp_path)
    assert single_run.returncode == 0, single_run.stderr
    assert hashes(tmp_path / "runs" / "one") == hashes(runs / "fedprox_seed-1")
    assert run("sweep").splitlines()[0] == "4 runs in runs/few, 4 of them done"
    run("sweep", "rounds=3")
    assert len(hashes(runs / "fedavg_seed-0")) == 3
    run_list = (runs / "sweep.json").read_bytes()
    message = "contains a run with 3 rounds, but the sweep has rounds: 2; set rounds=3, give the sweep"
    assert message in run("sweep", "rounds=2", code=2)
    assert (runs / "sweep.json").read_bytes() == run_list  # a refused command writes nothing
    assert "contains a run with other settings: train.lr is 0.01 there, but 0.5 in the sweep" in run(
        "sweep", "train.lr=0.5", code=2
    )


def test_a_run_in_use_is_skipped_and_does_not_fail(run, tmp_path):
    run_directory = tmp_path / "runs" / "few" / "fedavg_seed-0"
    run_directory.mkdir(parents=True)
    with lock.hold_lock(run_directory):
        output = run("sweep", "rounds=1", "include={seed: 0}", code=75)
    assert f"fedavg_seed-0: in use by process {os.getpid()} on host" in output
    assert "FAILED" not in output
    assert "1 run in use by another process; when it has ended, run: fedmpi sweep" in output
    assert "fedprox_seed-0: accuracy" in output


def test_an_early_stopped_run_is_finished(run, tmp_path):
    """If patience is increased, the run continues."""
    overrides = ["include={seed: 0, method: FedAvg}", "data.validation=0.2", "rounds=40"]
    best = "evaluate.best={metric: accuracy, goal: lowest, patience: %d}"  # the first model remains the worst
    run("sweep", *overrides, best % 1)
    run_directory = tmp_path / "runs" / "few" / "fedavg_seed-0"
    assert json.loads((run_directory / "summary.json").read_text())["exit_reason"].startswith("early_stopped: ")
    rounds = len(hashes(run_directory))
    assert rounds < 10
    assert "1 of them done" in run("sweep", *overrides, best % 1)
    run("sweep", *overrides, best % 2)
    assert len(hashes(run_directory)) == rounds + 1


@pytest.mark.parametrize(("protocol", "shown"), [("global", "accuracy"), ("personal", "personal accuracy")])
def test_runs_are_compared_by_the_main_evaluation_metric(file, run, protocol, shown):
    """Not by a metric of the method, although it is recorded before the first evaluation."""
    words = ["rounds=4", "evaluate.every=2", f"evaluate.protocol=[{protocol}]", "include={seed: 0, method: Exp}"]
    file.write_text(SMALL_SWEEP.replace("FedProx: {method: {name: fedprox, mu: 0.1}}", "Exp: {method: {name: fedexp}}"))
    assert re.search(rf": {shown} \d", run("sweep", *words))
    assert run("table", *words).startswith(f"{shown}, after the last round")


def test_a_sweep_does_not_write_into_a_run_directory(run, tmp_path):
    run_directory = tmp_path / "runs" / "few"
    run_directory.mkdir(parents=True)
    (run_directory / "metrics.jsonl").write_text("")
    message = "sweep.yaml: name: runs/few is the directory of a run, which cannot contain the runs of a sweep"
    assert message in run("sweep", code=2)
    assert list(run_directory.iterdir()) == [run_directory / "metrics.jsonl"]


def test_validate_checks_settings_and_data(run, tmp_path):
    mnist = ["data.source=mnist", f"data.root={tmp_path}"]
    assert run("validate").splitlines()[-1] == "ok"
    missing = run("validate", *mnist, code=2)
    assert "no errors were found, except that data are missing" in missing
    assert "mnist: file " in missing
    assert "method.mu: unknown key" in run("validate", *mnist, "method.mu=1", code=2)
    assert "is a sweep of several runs; train them with `fedmpi sweep" in run("run", code=2)


def test_tuning_chooses_the_best_candidate_of_each_method(file, run, tmp_path):
    """On validation rows, for one seed; diverged candidates are excluded; choices are recorded and printed."""
    tune = "tune: {grid: {train.lr: [0.001, 1.0e+30, 0.1, 0.3]}, by: accuracy, using: {seed: 0}}\n"
    file.write_text(SMALL_SWEEP.replace("clients: 3}", "clients: 3}, validation: 0.1") + tune)
    output = run("sweep")
    runs = tmp_path / "runs" / "few"
    choices = json.loads((runs / "tuning.json").read_text())
    assert (choices["by"], choices["of"]) == ("validation_accuracy", "last")
    for cell in choices["cells"]:
        values = {}
        for candidate in cell["candidates"]:
            ((name, value),) = candidate["runs"].items()
            summary = json.loads((runs / name / "summary.json").read_text())
            if summary.get("diverged") is None and "failed" not in summary["exit_reason"]:
                assert candidate["mean"] == value == summary["last"]["validation_accuracy"]
                values[candidate["labels"]["train.lr"]] = value
        assert "1e+30" not in values
        assert cell["chosen"]["train.lr"] == max(values, key=values.get)
        chosen = f"{cell['cell']['method'].lower()}_seed-1_lr-{cell['chosen']['train.lr']}"
        assert (runs / chosen / "summary.json").exists()
        assert f"chosen by validation_accuracy: method {cell['cell']['method']}: train.lr" in output
    assert len(list(runs.glob("*_seed-1_*"))) == 2  # only the chosen candidates train with the other seed
    second_output = run("sweep")
    assert "8 tuning runs in runs/few, 8 of them done" in second_output
    assert "2 final runs in runs/few, 2 of them done" in second_output
    assert "10 of 10 runs done" in run("sweep", "--status")
    table = run("table")
    assert "2 of 2" not in table
    assert "chosen by validation accuracy after the last round" in table
    failed_output = run("sweep", "name=none", "tune.grid={train.lr: [1.0e+30]}", "include={method: FedAvg}", code=2)
    assert "tune: method FedAvg: no candidate chosen, because every candidate has diverged" in failed_output


def test_finished_runs_match_settings_with_omitted_defaults(file, run):
    """Run directories record all defaults, also of augmentations and of methods that other methods use."""
    augmented = SMALL_SWEEP.partition("grid:")[0].replace(
        "clients: 3}", "clients: 3}, augment: [{random_crop: 1}, horizontal_flip]"
    )
    file.write_text(augmented + "grid: {method: {mine: {method: {name: fedsol, prox: fedprox}}}}\n")
    run("sweep")
    assert "1 of them done" in run("sweep")
    assert "contains a run with other settings: data.augment" in run(
        "sweep", "data.augment=[{random_crop: 2}, horizontal_flip]", code=2
    )
