"""How many runs of a sweep there are at once: cores, GPUs, memory, which never runs out; what a terminal shows."""

import os
import subprocess
import time

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.runtime.sweeping import pool, progress, room, view
from fedmpi.runtime.sweeping.room import Held, Room

GIB = 1 << 30


def named(name, **changes):
    return settings(**changes).model_copy(update={"name": name})


@pytest.fixture
def machine(monkeypatch):
    """A machine of 10 GiB, of which machine["free"] GiB are left; 0.5 are to stay so."""
    has = {"free": 10.0}
    monkeypatch.setattr(room.memory, "available_bytes", lambda: int(has["free"] * GIB))
    monkeypatch.setattr(room, "total", lambda: 10 * GIB)
    return has


def test_a_run_is_ended_where_memory_runs_out_and_goes_on_later(machine, tmp_path):
    """The younger one, which would need as much as both have."""
    begun, killed = tmp_path / "begun", tmp_path / "killed"

    def job(own):
        with begun.open("a") as file:
            file.write(f"{own.name}\n")
        until = time.monotonic() + 60
        while not killed.exists() and time.monotonic() < until:
            time.sleep(0.02)
        os._exit(0)

    here, ended = Room(2, needs={"old": 1, "young": 1}), []

    def tell(each):
        ended.append(each)
        killed.touch()

    def look(running):  # once both run, nothing is left as long as the old one does
        if len(running) == 2:
            machine["free"] = 0.05

    todo = [(name, named(name, output=str(tmp_path))) for name in ("old", "young")]
    assert pool.Pool(job, here, tell, look).run(todo)
    assert begun.read_text().split() == ["old", "young", "young"]
    assert [(each.settings.name, each.code, each.again) for each in ended] == [
        ("young", -9, True),
        ("old", 0, False),
        ("young", 0, False),
    ]
    assert here.needs["young"] > 1  # by then it is known


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

    monkeypatch.setattr(room.subprocess, "run", ask)
    assert room._gpus() == found


def test_how_many_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(room.machine, "cores", lambda: 8)
    monkeypatch.setattr(room, "_gpus", lambda: ("4", "7"))
    monkeypatch.setattr(room.torch.version, "cuda", "13")
    here, cpu = [settings()] * 20, [settings(compute={"device": "cpu", "threads": 2})] * 20
    assert room.room("auto", here, {}).at_once == 2  # a GPU each
    assert room.room("auto", cpu, {}).at_once == 4
    assert room.room("auto", cpu[:3], {}).at_once == 3
    five = room.room("5", here, {})
    assert (five.at_once, [five.gpu(slot) for slot in range(3)], five.counts) == (5, ["4", "7", "4"], False)
    monkeypatch.setattr(room.torch.version, "cuda", None)  # GPUs that this torch cannot use
    assert room.room("auto", here, {}) == Room(8)
    for wrong in ("0", "-1", "many", ""):
        with pytest.raises(UserError, match=f"--jobs: {wrong}; auto, or a number"):
            room.room(wrong, here, {})
    seen = tmp_path / "seen"

    def job(own):
        with seen.open("a") as file:
            file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} ")
        time.sleep(0.3)
        os._exit(0)

    todo = [("", named(name, output=str(tmp_path))) for name in "ab"]
    pool.Pool(job, Room(2, ("4", "7"), counts=False), lambda ended: None).run(todo)
    assert sorted(seen.read_text().split()) == ["4", "7"]


def test_what_is_shown(monkeypatch):
    rows = {"a": {"round": 4, "accuracy": 71.25}, "b": {}}
    monkeypatch.setattr(progress, "last", lambda own: rows[own.name])
    monkeypatch.setattr(view.time, "monotonic", lambda: 100.0)
    said = []
    shown = view.View(6, 8, said.append, live=False)
    shown.began = 90.0
    shown.end("c", "FAILED (exit code 2): why (1 s)", failed=True)
    assert said == ["[3/8] c: FAILED (exit code 2): why (1 s); about 50 s left"]
    running = [Held(named(name, rounds=10), name, 95.0, 0, 0) for name in rows]
    shown.look(running)
    assert shown.lines() == [
        "  a  round 5/10  accuracy 71.25  5 s",
        "  b  round 0/10  5 s",
        "2 of 8 runs done, 1 FAILED, 2 running, 3 waiting; about 30 s left",  # 1.5 of 6 in 10 s
    ]
    shown.end("a", "accuracy 80 (9 s)")
    assert [each.settings.name for each in shown.running] == ["b"]
