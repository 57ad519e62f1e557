"""The number of runs of a sweep that train at the same time, by cores, GPUs and memory."""

import os
import time

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.sweeps import pool


@pytest.mark.parametrize(
    ("visible", "count", "gpus"),
    [("0,3", 2, ("0", "3")), ("MIG-a, MIG-b", 2, ("MIG-a", "MIG-b")), ("", 0, ()), (None, 2, ("0", "1")), ("0", 0, ())],
)
def test_gpus_are_those_of_cuda_visible_devices(monkeypatch, visible, count, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pool.torch.cuda, "device_count", lambda: count)
    assert pool._list_gpus() == gpus


def test_parallel_runs_are_limited_by_cores_gpus_and_memory(monkeypatch):
    free = [1 << 40]
    monkeypatch.setattr(pool.host_memory, "count_usable_cores", lambda: 8)
    monkeypatch.setattr(pool.host_memory, "get_available_bytes", lambda: free[0])
    monkeypatch.setattr(pool, "_list_gpus", lambda: ("4", "7"))
    here, cpu = [settings()] * 20, [settings(compute={"device": "cpu", "threads": 2})] * 20
    assert pool.choose_parallelism("auto", here) == (2, ("4", "7"))  # one run per GPU
    assert pool.choose_parallelism("auto", cpu) == (4, ())
    assert pool.choose_parallelism("auto", cpu[:3]) == (3, ())
    assert pool.choose_parallelism("5", here) == (5, ("4", "7"))
    for bytes_, runs in ((5 << 30, 2), (1 << 30, 1), (None, 4)):
        free[0] = bytes_
        assert pool.choose_parallelism("auto", cpu) == (runs, ())
    for wrong in ("0", "-1", "many", ""):
        with pytest.raises(UserError, match=f"--jobs: {wrong} is not allowed; must be auto or a whole number"):
            pool.choose_parallelism(wrong, here)


def test_parallel_runs_get_different_gpus(tmp_path):
    log, codes = tmp_path / "seen", []

    def job(settings_of_run):
        with log.open("a") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '-')} ")
        time.sleep(0.3)
        os._exit(3)

    todo = [settings(output=str(tmp_path)).model_copy(update={"name": name}) for name in "ab"]
    assert pool.ProcessPool(job, 2, ("4", "7"), lambda active_run: codes.append(active_run.process.exitcode)).run(todo)
    assert (sorted(log.read_text().split()), codes) == (["4", "7"], [3, 3])
