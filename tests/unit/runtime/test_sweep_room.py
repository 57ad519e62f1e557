"""How many runs of a sweep there are at once: cores, GPUs, memory, which never runs out; what a terminal shows."""

import os
import subprocess
import time

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.runtime.sweeping import pool, room
from fedmpi.runtime.sweeping.room import Room


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
