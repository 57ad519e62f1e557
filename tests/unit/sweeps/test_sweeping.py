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


def hashes(run):
    return [json.loads(line)["sha256"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_bits_of_single_runs_and_only_what_is_missing(file, tmp_path):
    runs = tmp_path / "runs" / "few"
    done = fedmpi("sweep", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *lines, after = done.stdout.splitlines()
    assert lines[0] == "4 runs in runs/few"
    assert after == "next: fedmpi table runs/few; fedmpi report runs/few"
    assert [line.partition("]")[0] for line in lines[1:]] == [f"[{i}/4" for i in range(1, 5)]
    assert all(": accuracy " in line for line in lines[1:])
    names = sorted(path.name for path in runs.iterdir())
    assert names == ["fedavg_seed-0", "fedavg_seed-1", "fedprox_seed-0", "fedprox_seed-1", "sweep.json"]
    text = SMALL_SWEEP.partition("over:")[0]
    (tmp_path / "one.yaml").write_text(text + "seed: 1\n")
    alone = fedmpi("run", "one.yaml", "method={name: fedprox, mu: 0.1}", "name=one", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert hashes(tmp_path / "runs" / "one") == hashes(runs / "fedprox_seed-1")
    assert fedmpi("sweep", file, cwd=tmp_path).stdout.splitlines()[0] == "4 runs in runs/few, 4 of them done"
    more = fedmpi("sweep", file, "rounds=3", cwd=tmp_path)
    assert more.returncode == 0
    assert len(hashes(runs / "fedavg_seed-0")) == 3
    asked = (runs / "sweep.json").read_bytes()
    fewer = fedmpi("sweep", file, "rounds=2", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "holds a run with 3 rounds, and the sweep now asks for 2; ask for rounds=3, give the sweep" in fewer.stderr
    assert (runs / "sweep.json").read_bytes() == asked  # who is refused has written nothing
    other = fedmpi("sweep", file, "train.lr=0.5", cwd=tmp_path)
    assert other.returncode == 2
    assert "holds a run with train.lr: 0.01, and the sweep now asks for 0.5" in other.stderr


def test_a_run_that_is_in_use_has_not_failed(file, tmp_path):
    """By another sweep, say, that is at it."""
    run = tmp_path / "runs" / "few" / "fedavg_seed-0"
    run.mkdir(parents=True)
    with lock.hold(run):
        done = fedmpi("sweep", file, "rounds=1", "only={seed: 0}", cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    assert f"fedavg_seed-0: in use by process {os.getpid()} on host" in done.stdout
    assert "FAILED" not in done.stdout
    assert "1 run in use by another process; when that has ended: fedmpi sweep" in done.stdout
    assert "fedprox_seed-0: accuracy" in done.stdout


def test_a_run_that_ends_early_is_done(file, tmp_path):
    """Unless more patience is asked for."""
    more = ["only={seed: 0, method: FedAvg}", "data.validation=0.2", "rounds=40"]
    best = "evaluate.best={metric: accuracy, goal: lowest, patience: %d}"  # the first model is the worst, and stays it
    done = fedmpi("sweep", file, *more, best % 1, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "few" / "fedavg_seed-0"
    assert json.loads((run / "summary.json").read_text())["exit_reason"].startswith("early stopped: ")
    rounds = len(hashes(run))
    assert rounds < 10
    assert "1 of them done" in fedmpi("sweep", file, *more, best % 1, cwd=tmp_path).stdout
    again = fedmpi("sweep", file, *more, best % 2, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(hashes(run)) == rounds + 1


@pytest.mark.parametrize(("protocol", "shown"), [("global", "accuracy"), ("personal", "personal accuracy")])
def test_runs_are_compared_by_what_they_are_judged_by(file, tmp_path, protocol, shown):
    """Not by what the method says of its steps, which stands in rounds before the first evaluation."""
    words = ["rounds=4", "evaluate.every=2", f"evaluate.protocol=[{protocol}]", "only={seed: 0, method: Exp}"]
    file.write_text(SMALL_SWEEP.replace("FedProx: {method: {name: fedprox, mu: 0.1}}", "Exp: {method: {name: fedexp}}"))
    done = fedmpi("sweep", file, *words, cwd=tmp_path)
    assert re.search(rf": {shown} \d", done.stdout), done.stdout + done.stderr
    done = fedmpi("table", file, *words, cwd=tmp_path)
    assert done.stdout.startswith(f"{shown}, after the last round"), done.stdout + done.stderr


def test_no_sweep_writes_into_a_runs_directory(file, tmp_path):
    run = tmp_path / "runs" / "few"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    done = fedmpi("sweep", file, cwd=tmp_path)
    assert done.returncode == 2
    assert "sweep.yaml: name: runs/few is the directory of a run, in which no runs of a sweep can lie" in done.stderr
    assert list(run.iterdir()) == [run / "metrics.jsonl"]


def test_validate(file, tmp_path):
    assert fedmpi("validate", file, cwd=tmp_path).stdout.splitlines()[-1] == "ok"
    missing = fedmpi("validate", file, "data.source=mnist", f"data.root={tmp_path}", cwd=tmp_path)
    assert missing.returncode == 2
    assert "nothing is wrong but that data are missing" in missing.stderr
    assert "mnist: there is no file" in missing.stderr
    wrong = fedmpi("validate", file, "data.source=mnist", "method.mu=1", f"data.root={tmp_path}", cwd=tmp_path)
    assert "method.mu: unknown key" in wrong.stderr
    run = fedmpi("run", file, cwd=tmp_path)
    assert run.returncode == 2
    assert "asks for many runs; `fedmpi sweep" in run.stderr


def test_each_method_has_the_best_of_a_few_settings(file, tmp_path):
    """Chosen on validation rows of the named seed; what diverges is not chosen; the choice is data, and is told."""
    more = "best: {over: {train.lr: [0.001, 1.0e+30, 0.1, 0.3]}, by: accuracy, using: {seed: 0}}\n"
    file.write_text(SMALL_SWEEP.replace("clients: 3}", "clients: 3}, validation: 0.1") + more)
    done = fedmpi("sweep", file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = tmp_path / "runs" / "few"
    found = json.loads((runs / "best.json").read_text())
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
        assert f"chosen by validation_accuracy: method {cell['cell']['method']}: train.lr" in done.stdout
    assert len(list(runs.glob("*_seed-1_*"))) == 2  # the other seed has no candidate but these
    again = fedmpi("sweep", file, cwd=tmp_path)
    assert "8 runs to choose by in runs/few, 8 of them done" in again.stdout
    assert "2 runs with what was chosen in runs/few, 2 of them done" in again.stdout
    assert "10 of 10 runs done" in fedmpi("sweep", file, "--status", cwd=tmp_path).stdout
    table = fedmpi("table", file, cwd=tmp_path)
    assert "2 of 2" not in table.stdout
    assert "chosen by validation accuracy after the last round" in table.stdout
    none = fedmpi("sweep", file, "name=none", "best.over={train.lr: [1.0e+30]}", "only={method: FedAvg}", cwd=tmp_path)
    assert none.returncode == 2
    assert "best: method FedAvg: not chosen, every candidate has diverged" in none.stderr


def test_what_a_run_writes_down_at_length_is_what_was_asked_for(tmp_path):
    """Options of augmentation, and of methods within methods, with all their defaults."""
    file = tmp_path / "few.yaml"
    more = "data: {source: digits, partition: {scheme: iid, clients: 3}, augment: [{crop: 1}, flip]}\n"
    lines = [line for line in SMALL_SWEEP.partition("over:")[0].splitlines() if not line.startswith("data:")]
    method = "over: {method: {mine: {method: {name: fedsol, prox: fedprox}}}}\n"
    file.write_text("\n".join(lines) + f"\n{more}{method}")
    assert fedmpi("sweep", file, cwd=tmp_path).returncode == 0
    done = fedmpi("sweep", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of them done" in done.stdout
    other = fedmpi("sweep", file, "data.augment=[{crop: 2}, flip]", cwd=tmp_path)
    assert other.returncode == 2
    assert "holds a run with data.augment" in other.stderr
