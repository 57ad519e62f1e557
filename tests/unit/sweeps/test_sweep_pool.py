"""How many runs of a sweep there are at once: cores, GPUs, memory, which never runs out; what a terminal shows."""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.sweeps import pool
from fedmpi.sweeps.pool import Resources


def named(name, **changes):
    return settings(**changes).model_copy(update={"name": name})


@pytest.mark.parametrize(
    ("told", "smi", "found"),
    [
        ("0,3", "", ("0", "3")),
        ("MIG-a, MIG-b", "", ("MIG-a", "MIG-b")),
        ("", "GPU-a, 0, 100", ()),
        ("-1", "GPU-a, 0, 100", ()),
        (None, "GPU-a, 90, 100\nGPU-b, 2, 100\nGPU-c, 0, 100", ("GPU-b", "GPU-c")),  # somebody is at work on the first
        (None, "GPU-a, 90, 100\nGPU-b, 80, 100", ("GPU-a", "GPU-b")),
        (None, "GPU-a, [N/A], [N/A]", ("GPU-a",)),
        (None, None, ()),
    ],
)
def test_gpus(monkeypatch, told, smi, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)

    def ask(command, **_):
        assert command[1].startswith("--query-gpu=uuid")  # CUDA numbers GPUs otherwise
        if smi is None:
            raise FileNotFoundError("nvidia-smi")
        return subprocess.CompletedProcess(command, 0, smi + "\n")

    monkeypatch.setattr(pool.subprocess, "run", ask)
    assert pool._gpus() == found


def test_how_many_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(pool.host_memory, "usable_cores", lambda: 8)
    monkeypatch.setattr(pool, "_gpus", lambda: ("4", "7"))
    monkeypatch.setattr(pool.torch.version, "cuda", "13")
    here, cpu = [settings()] * 20, [settings(compute={"device": "cpu", "threads": 2})] * 20
    assert pool.resources("auto", here).jobs == 2  # a GPU each
    assert pool.resources("auto", cpu).jobs == 4
    assert pool.resources("auto", cpu[:3]).jobs == 3
    assert pool.resources("5", here) == Resources(5, ("4", "7"), check_memory=False)
    monkeypatch.setattr(pool.torch.version, "cuda", None)  # GPUs that this torch cannot use
    assert pool.resources("auto", here) == Resources(8)
    for wrong in ("0", "-1", "many", ""):
        with pytest.raises(UserError, match=f"--jobs: {wrong}; auto, or a number"):
            pool.resources(wrong, here)


def train(tmp_path, resources, names="ab"):
    """What the children write of their GPUs, and the exit codes, in the order in which they end."""
    seen, codes = tmp_path / "seen", []

    def job(own):
        with seen.open("a") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '-')} ")
        time.sleep(0.3)
        os._exit(3)

    todo = [named(name, output=str(tmp_path)) for name in names]
    assert pool.Pool(job, resources, lambda one: codes.append(one.process.exitcode)).run(todo)
    return seen.read_text().split(), codes


def test_each_run_at_once_has_a_gpu_of_its_own(tmp_path):
    assert train(tmp_path, Resources(2, ("4", "7"), check_memory=False)) in ((["4", "7"], [3, 3]), (["7", "4"], [3, 3]))


def test_no_run_begins_that_does_not_fit_beside_the_others(tmp_path, monkeypatch):
    """The first one is alone until it has closed a round, and each further one needs what the largest has held."""
    (settings,) = [named("a", output=str(tmp_path))]
    workers = pool.Pool(lambda own: None, Resources(3), lambda one: None)
    assert workers._has_room()
    workers.running = [pool.Running(settings, SimpleNamespace(pid=1), 0, 0, time.monotonic())]
    free = {"all": 1000, "left": 900}
    monkeypatch.setattr(pool, "_memory_of", lambda pid: (200, 300))  # now, at its most
    monkeypatch.setattr(pool, "_total_memory", lambda: free["all"])
    monkeypatch.setattr(pool.host_memory, "available_bytes", lambda: free["left"])
    assert not workers._has_room()
    monkeypatch.setattr(pool.progress, "rounds_done", lambda settings: 1)
    assert workers._has_room()
    free["left"] = 449  # 300 for it, 100 by which the other may grow again, 50 to spare
    assert not workers._has_room()
    free["left"] = 450
    assert workers._has_room()
    workers.running *= 3
    assert not workers._has_room()
