"""`fedmpi status` derives the state of a run from its directory, without slow imports."""

import json
import time

import pytest
from helpers import fedmpi

from fedmpi.runtime.inspection import run_files, status
from fedmpi.runtime.record import lock
from fedmpi.sweeps import sweep_status as sweep_status


def row(t, **more):
    first = {"round": t, "train_loss": 2.0 - t / 10, "cohort": [0, 1], "refused": [], "wall_s": 9.0 if t == 0 else 2.0}
    return {**first, "sent_bytes": 100, "received_bytes": 50, "sha256": f"{t:064}", **more}


def make_run(place, rows=(), summary=None, rounds=10, rows_held=False, checkpoint=None, **named):
    """Write a run directory by hand."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "identity.json").write_text(json.dumps({"rounds": str(rounds), "name": "'x'"}))
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    if summary is not None:
        (place / "summary.json").write_text(json.dumps({"exit_reason": summary}))
    (place / "lock").write_text(json.dumps({"host": "node1", "pid": 7, "since": "now"}))
    if checkpoint is not None:
        (place / "checkpoints").mkdir(exist_ok=True)
        (place / "checkpoints" / f"{checkpoint:06}.safetensors").write_bytes(b"")
    for name, content in named.items():
        (place / name).write_text(content)
    return place


FEW = [row(t) for t in range(4)]


@pytest.mark.parametrize(
    ("summary", "rows", "checkpoint", "state", "why", "code"),
    [
        ("finished", [row(t) for t in range(10)], 9, status.FINISHED, "", 0),
        ("early_stopped: accuracy did not rise for 3 rounds", FEW, 3, status.FINISHED, "accuracy did not rise", 0),
        ("signal 15", FEW, 3, status.STOPPED, "signal 15", 75),
        ("stopped", FEW, None, status.STOPPED, "on request", 1),  # nothing to go on from
        ("failed: rank 2 on node5 is dead", FEW, 3, status.FAILED, "rank 2 on node5 is dead", 1),
        ("diverged: the loss is 9", FEW, 3, status.FAILED, "diverged: the loss is 9", 1),
        (None, FEW, 3, status.DIED, "", 75),
        (None, [], None, status.DIED, "before its first round", 1),
    ],
)
def test_states_and_exit_codes(tmp_path, summary, rows, checkpoint, state, why, code):
    results = status.read_run_status(make_run(tmp_path / "run", rows, summary, checkpoint=checkpoint))
    assert (results["state"], status.status_exit_code(results)) == (state, code)
    assert why in results["why"]
    assert results["rounds_done"] == len(rows)
    assert results["resume"] == (checkpoint is not None and state != status.FINISHED)
    assert ("fedmpi resume" in "\n".join(status.format_status(results))) == results["resume"]


def test_a_running_job_is_recognised_by_its_lock(tmp_path):
    run = make_run(tmp_path / "run", FEW, "failed: before it was gone on with")
    with lock.hold_lock(run):
        results = status.read_run_status(run)
        assert results["state"] == status.RUNNING
        assert lock.inspect_lock(run)[0] is True
    assert lock.inspect_lock(run)[0] is False
    with lock.hold_lock(run):  # who looked has left nothing
        pass


def test_reading_the_status_does_not_prevent_a_job_from_starting(tmp_path, monkeypatch):
    """Status takes a shared lock for a moment, and a job that starts in that moment tries again."""
    import fcntl
    import os

    (tmp_path / "lock").touch()
    file = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.close(file))
    with lock.hold_lock(tmp_path):
        assert lock.inspect_lock(tmp_path)[0] is True


def test_without_locks_a_recent_write_means_running(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", FEW, checkpoint=3)
    monkeypatch.setattr(lock, "inspect_lock", lambda _: (None, {"host": "far"}))
    assert status.read_run_status(run)["state"] == status.RUNNING
    assert status.read_run_status(run, time.time() + 3600)["state"] == status.DIED


def test_the_eta_uses_measured_rounds_except_the_first(tmp_path):
    run = make_run(tmp_path / "run", FEW)
    with lock.hold_lock(run):
        results = status.read_run_status(run)
        assert results["round_s"] == 2.0
        assert results["eta_s"] == 6 * 2.0
        first = status.read_run_status(make_run(tmp_path / "first", [row(0)]))
    assert first["round_s"] == 9.0  # there is no other
    long = make_run(tmp_path / "long", [row(t, wall_s=1.0 + (t >= 30)) for t in range(50)], rounds=100)
    assert status.read_run_status(long)["round_s"] == 2.0  # of the last twenty


def test_status_shows_metrics_bytes_faults_and_ranks(tmp_path):
    rows = [row(0, loss=2.3, accuracy=10.0), row(1, loss=1.5, accuracy=50.0), row(2, refused=[{"client": 1}]), row(3)]
    loss = {"round": 2, "ranks": {"2": "node5"}, "clients": [3]}
    ranks = {"ranks": [{"rank": r, "host": f"node{r}"} for r in range(3)], "launcher": "slurm", "slurm_job_id": "77"}
    named = {"faults.jsonl": json.dumps(loss) + "\n", "environment.json": json.dumps(ranks)}
    run = make_run(tmp_path / "run", rows, **named)
    with lock.hold_lock(run):
        results = status.read_run_status(run)
    assert (results["metrics"], results["metrics_round"]) == ({"train_loss": 1.9, "loss": 1.5, "accuracy": 50.0}, 1)
    assert (results["sent_bytes"], results["received_bytes"]) == (400, 200)
    assert (results["ranks"], results["lost"]) == (3, {"2": 2})
    text = "\n".join(status.format_status(results))
    assert "loss 1.5, accuracy 50.00, train_loss 1.9 (round 2)" in text
    assert "3 on 3 hosts, Slurm job 77; rank 2 lost in round 2" in text
    assert "uploads refused in 1 round" in text
    assert "400 B down" in text


def test_status_skips_incomplete_and_damaged_lines(tmp_path):
    run = make_run(tmp_path / "run", FEW)
    complete = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe{}\n" + complete.encode() + b'{"round": 4, "wa')
    (run / "identity.json").write_text('{"rounds": "1')
    (run / "environment.json").write_text("[]")
    results = status.read_run_status(run)
    assert (results["rounds_done"], results["rounds"], results["unreadable"], results["ranks"]) == (4, None, 1, None)
    assert "1 line of metrics.jsonl cannot be read" in "\n".join(status.format_status(results))
    assert json.dumps(results, allow_nan=False)


def test_status_of_something_else_is_an_error(tmp_path):
    empty, foreign, file = tmp_path / "empty", tmp_path / "foreign", tmp_path / "file.txt"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "holiday.jpg").touch()
    file.touch()
    result = fedmpi("status", empty)
    assert result.returncode == 1
    assert "never started" in result.stdout
    for place, output in (
        (foreign, "is not a run directory"),
        (file, "is a file"),
        (tmp_path / "no", "does not exist"),
    ):
        result = fedmpi("status", place)
        assert (result.returncode, result.stdout) == (2, "")
        assert output in result.stderr
        assert result.stderr.count("\n") == 1


def test_status_of_a_sweep_directory(tmp_path):
    place = tmp_path / "few"
    make_run(place / "a", [row(t) for t in range(10)], "finished")
    make_run(place / "b", FEW, "failed: no such weights")
    (place / "c.log").write_text("fedmpi: error: data.root: no such directory\n")
    (place / run_files.SWEEP_FILE).write_text(json.dumps({"runs": ["a", "b", "c", "d", "e"]}))
    results = sweep_status.read_directory_status(place)
    assert {run["name"]: run["state"] for run in results["runs"]} == {
        "a": "finished", "b": "failed", "c": "failed", "d": "waiting", "e": "waiting",
    }  # fmt: skip
    assert sweep_status.format_status(results) == [
        "b: failed, 4 of 10 rounds: no such weights",
        "c: failed: data.root: no such directory",
        "1 of 5 runs done, 2 failed, 2 waiting",
    ]
    assert sweep_status.choose_exit_code(results) == 1
    result = fedmpi("status", place, "--json")
    assert (result.returncode, json.loads(result.stdout)["counts"]["failed"]) == (1, 2)
