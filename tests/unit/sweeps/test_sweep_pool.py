"""How many runs of a sweep there are at once: cores, GPUs, memory, which never runs out."""

import os
import re
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.sweeps import pool
from fedmpi.sweeps.pool import Resources


def named(name, **changes):
    return settings(**changes).model_copy(update={"name": name})


@pytest.mark.parametrize(
    ("visible", "count", "gpus"),
    [("0,3", 2, ("0", "3")), ("MIG-a, MIG-b", 2, ("MIG-a", "MIG-b")), ("", 0, ()), (None, 2, ("0", "1")), ("0", 0, ())],
)
def test_gpus(monkeypatch, visible, count, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pool.torch.cuda, "device_count", lambda: count)
    assert pool._gpus() == gpus


def test_how_many_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(pool.host_memory, "usable_cores", lambda: 8)
    monkeypatch.setattr(pool, "_gpus", lambda: ("4", "7"))
    here, cpu = [settings()] * 20, [settings(compute={"device": "cpu", "threads": 2})] * 20
    assert pool.resources("auto", here).jobs == 2  # a GPU each
    assert pool.resources("auto", cpu).jobs == 4
    assert pool.resources("auto", cpu[:3]).jobs == 3
    assert pool.resources("5", here) == Resources(5, ("4", "7"), check_memory=False)
    monkeypatch.setattr(pool, "_gpus", lambda: ())
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


def test_as_many_runs_at_once_as_fit_into_memory(tmp_path, monkeypatch):
    """The first one is alone until it has completed a round; the others are taken to need what it has."""
    (settings,) = [named("a", output=str(tmp_path))]
    workers = pool.Pool(lambda own: None, Resources(5), lambda one: None)
    assert workers._has_room()
    workers.running = [pool.Running(settings, SimpleNamespace(pid=os.getpid()), 0, 0, time.monotonic())]
    assert not workers._has_room()
    own = int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    monkeypatch.setattr(pool.host_memory, "available_bytes", lambda: 3 * 1024 * max(own, children))
    monkeypatch.setattr(pool.progress, "rounds_done", lambda settings: 1)
    assert workers._has_room()
    assert workers.most == 3  # itself, and two in nine tenths of three times its size
    workers.running *= 3
    assert not workers._has_room()
