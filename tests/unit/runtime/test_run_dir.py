"""The run directory: its files, its lock, its summary, and what records a run."""

import errno
import fcntl
import gc
import io
import json
import math
import os
import threading
import warnings
import weakref
from contextlib import ExitStack
from statistics import fmean
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import settings, small_settings

from fedmpi.common.errors import UserError
from fedmpi.runtime import checkpoints, execute
from fedmpi.runtime.record import atomic_files, lock, run_dir
from fedmpi.runtime.record.console_text import format_round
from fedmpi.runtime.record.recorder import CheckpointRecorder, Recorder
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.record.summary import summarize_run


@pytest.fixture
def record(tmp_path):
    return RunDirectory.create(tmp_path / "deep" / "runs", "a")


def test_an_incomplete_line_is_removed_when_a_run_is_resumed(record):
    """Otherwise the next line would be appended to it."""
    for name in ("clients.jsonl", "metrics.jsonl"):
        (record.path / name).write_text('{"round": 0, "pa')
    record.delete_rows_from(0)
    record.append("clients.jsonl", {"round": 1})
    assert record.read_rows("clients.jsonl") == [{"round": 1}]
    assert record.read_rows("metrics.jsonl") == []


def test_each_run_gets_its_own_directory(tmp_path):
    names = [RunDirectory.create(tmp_path, "a").path.name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot create .*: File exists"):
        RunDirectory.create(tmp_path / "file", "a")
    with pytest.raises(UserError, match=r"cannot create .*: Not a directory; set output to another directory"):
        RunDirectory.create(tmp_path / "file" / "deeper", "a")


# ---- a disk that takes no more ----
class Full(io.FileIO):
    """A file on a disk with room for seven more bytes."""

    left = 7

    def write(self, content):
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken, self.left = bytes(content[: self.left]), max(self.left - len(content), 0)
        return super().write(taken)


def test_a_failed_append_leaves_no_partial_line(record, monkeypatch):
    record.append("metrics.jsonl", {"round": 0})
    with monkeypatch.context() as patch:
        for module in (run_dir, atomic_files):
            patch.setattr(module, "open", lambda path, mode, **_: Full(path, mode.replace("b", "")), raising=False)
        with pytest.raises(UserError, match=r"run directory: cannot write .*metrics\.jsonl: No space left on device"):
            record.append("metrics.jsonl", {"round": 1})
    assert record.read_rows("metrics.jsonl") == [{"round": 0}]
    record.append("metrics.jsonl", {"round": 1})
    assert record.read_rows("metrics.jsonl") == [{"round": 0}, {"round": 1}]


def test_a_failed_write_leaves_no_file(record, monkeypatch):
    record.write_json("summary.json", {"rounds": 1})
    monkeypatch.setattr(os, "fsync", lambda number: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(UserError, match=r"cannot write .*summary\.json: No space left on device"):
        record.write_json("summary.json", {"rounds": 2})
    assert json.loads((record.path / "summary.json").read_text()) == {"rounds": 1}
    assert sorted(path.name for path in record.path.iterdir()) == ["summary.json"]


def test_after_a_failed_close_no_other_thread_writes(record):
    """An incomplete line is removed, and other threads can no longer write."""
    (record.path / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    assert record.close_failed()
    late = threading.Thread(target=record.append, args=("metrics.jsonl", {"round": 9}), daemon=True)
    late.start()
    late.join(0.2)
    assert late.is_alive()
    assert record.read_rows("metrics.jsonl") == [{"round": 0}]
    record.write_json("summary.json", {"rounds": 1})
    assert not record.close_failed()  # what is finished stays as it is


def test_rows_are_valid_json_for_any_numbers(record):
    row = {
        "round": 0,
        "loss": math.nan,
        "x": [np.float32("inf"), torch.tensor(-math.inf)],
        "n": np.int64(3),
        "ok": True,
    }
    record.append("metrics.jsonl", row)
    record.append("metrics.jsonl", {"round": 1, "loss": 0.5})
    text = (record.path / "metrics.jsonl").read_text()

    def refuse(name):  # Python's own reader takes NaN and Infinity, which are no JSON
        raise AssertionError(name)

    first, second = (json.loads(line, parse_constant=refuse) for line in text.splitlines())
    assert first == {"round": 0, "loss": None, "x": [None, None], "n": 3, "ok": True}
    assert record.read_rows("metrics.jsonl") == [first, second]
    rows = [{"round": 0, "client": k, "accuracy": 50.0} for k in (2, 5)]
    record.append("clients.jsonl", *rows)
    assert [json.loads(line) for line in (record.path / "clients.jsonl").read_text().splitlines()] == rows


def test_a_model_of_views_of_one_vector_can_be_saved(record):
    w = torch.arange(12.0)
    tensors = {"weight": w[:8].view(2, 2, 2, 1).permute(0, 3, 1, 2), "bias": w[8:], "count": torch.tensor(3)}
    record.write_model(tensors)
    stored = safetensors.torch.load_file(record.path / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_summary():
    # 12 rounds, evaluated in all but round 11; accuracies 0, 10, ..., 100 with the best in round 4
    values = [0.0, 10.0, 20.0, 30.0, 100.0, 50.0, 60.0, 70.0, 80.0, 90.0, 40.0]
    rows = [
        {"round": i, "accuracy": v, "loss": 1 / (1 + v), "wall_s": 2.0, "sent_bytes": 3} for i, v in enumerate(values)
    ]
    facts = summarize_run([*rows, {"round": 11, "wall_s": 1.0}], ("accuracy", "loss"), "finished")
    assert (facts["rounds"], facts["exit_reason"]) == (12, "finished")
    assert (facts["last"]["accuracy"], facts["last_round"]["accuracy"]) == (40.0, 10)
    assert facts["mean_last_10"]["accuracy"] == 55.0  # (10 + 20 + ... + 100) / 10
    gap = summarize_run([*rows, {"round": 11, "accuracy": None}], ("accuracy",), "finished")
    assert gap["mean_last_10"]["accuracy"] == 60.0  # of the nine numbers among the last ten
    chosen = summarize_run(rows, ("accuracy", "loss"), "finished", best_model={"round": 9})
    assert chosen["selected"] == {"accuracy": 90.0, "loss": 1 / 91}
    assert (facts["best"]["accuracy"], facts["best_round"]["accuracy"]) == (100.0, 4)
    assert (facts["best"]["loss"], facts["best_round"]["loss"]) == (1 / 101, 4)
    assert (facts["wall_s"], facts["sent_bytes"], facts["received_bytes"]) == (23.0, 9 + 24, 0)
    assert summarize_run([], ("loss",), "rounds: 0")["last"] == {}
    assert summarize_run([{"round": 0, "loss": math.nan}], ("loss",), "finished")["best"] == {}
    losses = [{"round": 3, "ranks": {"2": "a", "4": "b"}}, {"round": 5, "ranks": {}}, {"round": 9, "ranks": {"2": "a"}}]
    assert summarize_run([], (), "finished", losses)["lost_ranks"] == {"2": 9, "4": 3}


LOW_IS_GOOD = ["loss", "train_loss", "personal_mse", "personal_loss_worst_decile", "accuracy_std", "rmse"]
LOW_IS_GOOD += ["mae_worst_decile", "ece", "personal_perplexity"]


@pytest.mark.parametrize(
    ("name", "lower_is_better", "best"),
    [
        *((name, (), 1) for name in LOW_IS_GOOD),
        ("personal_mean_gap", (), 0),  # a metric of a task of the user's own, which may say that less is better
        ("personal_mean_gap", ("mean_gap",), 1),
    ],
)
def test_summary_selects_the_lowest_value_if_lower_is_better(name, lower_is_better, best):
    rows = [{"round": t, name: value} for t, value in enumerate((3.0, 1.0, 2.0))]
    assert summarize_run(rows, (name,), "finished", lower_is_better=lower_is_better)["best_round"] == {name: best}


ROWS = [
    {"round": 0, "wall_s": 8.0, "loss": 2.3026, "accuracy": 9.876},
    {"round": 1, "wall_s": 4.0},  # not evaluated
    {"round": 2, "wall_s": 6.0, "loss": 0.0004, "accuracy": 84.721},
]
LINES = [
    "round 1/3  loss 2.3  accuracy 9.88  8.0 s  eta 16 s",  # 2 rounds of 8 s are left
    "round 2/3  4.0 s  eta 6 s",  # one of (8 + 4) / 2 s
    "round 3/3  loss 0.0004  accuracy 84.72  6.0 s",
]


def test_round_lines_show_metrics_and_eta():
    """A resumed run estimates the time left from the rounds of this job."""
    seconds = [row["wall_s"] for row in ROWS]
    names = ("loss", "accuracy")
    lines = [format_round(row, 3, names, fmean(seconds[: n + 1])) for n, row in enumerate(ROWS)]
    assert lines == LINES
    row = {"round": 5, "wall_s": 30.0, "loss": math.nan}
    assert format_round(row, 10, names, 30.0) == "round 6/10  loss nan  30.0 s  eta 2 min"


# ---- one job at a time ----
def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_job_is_refused_until_the_first_one_ends(tmp_path):
    with lock.hold_lock(tmp_path):
        before = contents(tmp_path)
        with pytest.raises(UserError) as caught, lock.hold_lock(tmp_path):
            pass
        host = json.loads((tmp_path / "lock").read_text())["host"]
        assert str(caught.value).startswith(f"{tmp_path} is in use by process {os.getpid()} on host {host} since")
        assert contents(tmp_path) == before
    with lock.hold_lock(tmp_path):
        pass


def test_a_file_system_without_locks_causes_a_warning(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="this file system has no locks"), lock.hold_lock(tmp_path):
        pass


@pytest.mark.parametrize("how", ["auto", "must"])
def test_a_job_without_an_identity_file_is_not_resumed(tmp_path, how):
    """A job waits for it, and uses the directory if the other job has died."""
    (tmp_path / "run").mkdir()
    config = settings(output=str(tmp_path), checkpoint={"resume": how})
    with lock.hold_lock(tmp_path / "run"), ExitStack() as mine, pytest.raises(UserError, match="is in use"):
        checkpoints.open_run_directory(config, {}, mine)
    with ExitStack() as mine:
        if how == "must":
            with pytest.raises(UserError, match="contains no run to resume"):
                checkpoints.open_run_directory(config, {}, mine)
        else:
            assert checkpoints.open_run_directory(config, {}, mine)[0].path == tmp_path / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(lock.json, "dumps", Mock(side_effect=full))
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}/lock: No space left"), lock.hold_lock(tmp_path):
        pass


# ---- the recorder ----
def test_a_finished_run_frees_its_model(tmp_path, monkeypatch):
    """The error reporter of a job may still call `close_failed` of the recorder."""
    recorders, models = [], []

    class Watched(Recorder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            recorders.append(self)

    build = execute.build.make_experiment

    def experiment(*arguments):
        made = build(*arguments)
        models.append(weakref.ref(made.model))
        return made

    monkeypatch.setattr(execute, "Recorder", Watched)
    monkeypatch.setattr(execute.build, "make_experiment", experiment)
    execute.execute_run(small_settings("fedavg", "mlp", rounds=1, output=str(tmp_path)))
    gc.collect()
    assert models[0]() is None
    assert recorders[0].close_failed("the launcher has died") == ""


def test_warnings_before_the_log_exists_are_logged_too():
    """The warning filters are restored afterwards."""
    recorder, before = CheckpointRecorder(), list(warnings.filters)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with recorder.collect_warnings():
            warnings.warn("early", stacklevel=1)
            lines = list(recorder.early_lines)
            recorder.log = lines.append
            warnings.warn("late", stacklevel=1)
    assert lines == ["warning: early", "warning: late"]
    with recorder.collect_warnings():
        pass
    assert list(warnings.filters) == before
