"""`fedmpi sweep`: the bits of single runs, what is done is not done again, failures are loud, nothing stays behind."""

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
    """Runs a command on the sweep; its exit code must be as expected. Returns what it prints and its errors."""

    def call(command, *words, code=0):
        done = fedmpi(command, file, *words, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def hashes(run):
    return [json.loads(line)["sha256"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_bits_of_single_runs_and_only_what_is_missing(run, tmp_path):
    runs = tmp_path / "runs" / "few"
    *lines, after = run("sweep").splitlines()
    assert lines[0] == "4 runs in runs/few"
    assert after == "next: fedmpi table runs/few; fedmpi report runs/few"
    assert [line.partition("]")[0] for line in lines[1:]] == [f"[{i}/4" for i in range(1, 5)]
    assert all(": accuracy " in line for line in lines[1:])
    names = sorted(path.name for path in runs.iterdir())
    assert names == ["fedavg_seed-0", "fedavg_seed-1", "fedprox_seed-0", "fedprox_seed-1", "sweep.json"]
    (tmp_path / "one.yaml").write_text(SMALL_SWEEP.partition("grid:")[0] + "seed: 1\n")
    alone = fedmpi("run", "one.yaml", "method={name: fedprox, mu: 0.1}", "name=one", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert hashes(tmp_path / "runs" / "one") == hashes(runs / "fedprox_seed-1")
    assert run("sweep").splitlines()[0] == "4 runs in runs/few, 4 of them done"
    run("sweep", "rounds=3")
    assert len(hashes(runs / "fedavg_seed-0")) == 3
    asked = (runs / "sweep.json").read_bytes()
    said = "contains a run with 3 rounds, but the sweep has rounds: 2; set rounds=3, give the sweep"
    assert said in run("sweep", "rounds=2", code=2)
    assert (runs / "sweep.json").read_bytes() == asked  # who is refused has written nothing
    assert "contains a run with other settings: train.lr is 0.01 there, but 0.5 in the sweep" in run(
        "sweep", "train.lr=0.5", code=2
    )


def test_a_run_that_is_in_use_has_not_failed(run, tmp_path):
    """By another sweep, say, that is at it."""
    used = tmp_path / "runs" / "few" / "fedavg_seed-0"
    used.mkdir(parents=True)
    with lock.hold_lock(used):
        said = run("sweep", "rounds=1", "include={seed: 0}", code=75)
    assert f"fedavg_seed-0: in use by process {os.getpid()} on host" in said
    assert "FAILED" not in said
    assert "1 run in use by another process; when it has ended, run: fedmpi sweep" in said
    assert "fedprox_seed-0: accuracy" in said


def test_a_run_that_ends_early_is_done(run, tmp_path):
    """Unless more patience is asked for."""
    more = ["include={seed: 0, method: FedAvg}", "data.validation=0.2", "rounds=40"]
    best = "evaluate.best={metric: accuracy, goal: lowest, patience: %d}"  # the first model is the worst, and stays it
    run("sweep", *more, best % 1)
    done = tmp_path / "runs" / "few" / "fedavg_seed-0"
    assert json.loads((done / "summary.json").read_text())["exit_reason"].startswith("early_stopped: ")
    rounds = len(hashes(done))
    assert rounds < 10
    assert "1 of them done" in run("sweep", *more, best % 1)
    run("sweep", *more, best % 2)
    assert len(hashes(done)) == rounds + 1


@pytest.mark.parametrize(("protocol", "shown"), [("global", "accuracy"), ("personal", "personal accuracy")])
def test_runs_are_compared_by_what_they_are_judged_by(file, run, protocol, shown):
    """Not by what the method says of its steps, which stands in rounds before the first evaluation."""
    words = ["rounds=4", "evaluate.every=2", f"evaluate.protocol=[{protocol}]", "include={seed: 0, method: Exp}"]
    file.write_text(SMALL_SWEEP.replace("FedProx: {method: {name: fedprox, mu: 0.1}}", "Exp: {method: {name: fedexp}}"))
    assert re.search(rf": {shown} \d", run("sweep", *words))
    assert run("table", *words).startswith(f"{shown}, after the last round")


def test_no_sweep_writes_into_a_runs_directory(run, tmp_path):
    place = tmp_path / "runs" / "few"
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text("")
    said = "sweep.yaml: name: runs/few is the directory of a run, in which no runs of a sweep can lie"
    assert said in run("sweep", code=2)
    assert list(place.iterdir()) == [place / "metrics.jsonl"]


def test_validate(run, tmp_path):
    mnist = ["data.source=mnist", f"data.root={tmp_path}"]
    assert run("validate").splitlines()[-1] == "ok"
    missing = run("validate", *mnist, code=2)
    assert "no mistakes except that data are missing" in missing
    assert "mnist: there is no file" in missing
    assert "method.mu: unknown key" in run("validate", *mnist, "method.mu=1", code=2)
    assert "is a sweep of several runs; train them with `fedmpi sweep" in run("run", code=2)


def test_each_method_has_the_best_of_a_few_settings(file, run, tmp_path):
    """Chosen on validation rows of the named seed; what diverges is not chosen; the choice is data, and is told."""
    more = "tune: {grid: {train.lr: [0.001, 1.0e+30, 0.1, 0.3]}, by: accuracy, using: {seed: 0}}\n"
    file.write_text(SMALL_SWEEP.replace("clients: 3}", "clients: 3}, validation: 0.1") + more)
    first = run("sweep")
    runs = tmp_path / "runs" / "few"
    found = json.loads((runs / "tuning.json").read_text())
    assert (found["by"], found["of"]) == ("validation_accuracy", "last")
    for cell in found["cells"]:
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
        assert f"chosen by validation_accuracy: method {cell['cell']['method']}: train.lr" in first
    assert len(list(runs.glob("*_seed-1_*"))) == 2  # the other seed has no candidate but these
    again = run("sweep")
    assert "8 tuning runs in runs/few, 8 of them done" in again
    assert "2 final runs in runs/few, 2 of them done" in again
    assert "10 of 10 runs done" in run("sweep", "--status")
    table = run("table")
    assert "2 of 2" not in table
    assert "chosen by validation accuracy after the last round" in table
    none = run("sweep", "name=none", "tune.grid={train.lr: [1.0e+30]}", "include={method: FedAvg}", code=2)
    assert "tune: method FedAvg: no candidate chosen, because every candidate has diverged" in none


def test_what_a_run_writes_down_at_length_is_what_was_asked_for(file, run):
    """Options of augmentation, and of methods within methods, with all their defaults."""
    augmented = SMALL_SWEEP.partition("grid:")[0].replace(
        "clients: 3}", "clients: 3}, augment: [{random_crop: 1}, horizontal_flip]"
    )
    file.write_text(augmented + "grid: {method: {mine: {method: {name: fedsol, prox: fedprox}}}}\n")
    run("sweep")
    assert "1 of them done" in run("sweep")
    assert "contains a run with other settings: data.augment" in run(
        "sweep", "data.augment=[{random_crop: 2}, horizontal_flip]", code=2
    )
