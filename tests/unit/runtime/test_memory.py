"""How much memory there is for the ranks of this host."""

import pytest
import torch

from fedmpi.comm.launchers.job import Job
from fedmpi.common.errors import UserError
from fedmpi.runtime import memory
from fedmpi.runtime.memory import available_bytes, groups


def test_of_the_host(tmp_path):
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable: 5 kB\n")
    assert available_bytes(tmp_path) == 5 * 1024


@pytest.mark.parametrize(
    ("row", "top", "limit", "used", "unbounded", "cached"),
    [
        ("0::/job/step/task\n", "", "memory.max", "memory.current", "max", "inactive_file 100"),
        (
            "9:name=systemd:/\n4:cpu,memory:/job/step/task\n0::/\n",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            str(2**63 - 4096),
            "inactive_file 1\ntotal_inactive_file 100",
        ),
    ],
)
def test_of_control_groups(tmp_path, row, top, limit, used, unbounded, cached):
    """The group above that leaves least counts, of either version; files that are only cached leave room."""
    task = tmp_path / "sys" / "fs" / "cgroup" / top / "job" / "step" / "task"
    task.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(row)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 8 kB\n")
    for place, bound, uses in ((task, unbounded, 50), (task.parent, 4096, 1000), (task.parent.parent, 5000, 4000)):
        (place / limit).write_text(f"{bound}\n")
        (place / used).write_text(f"{uses}\n")
    assert groups(tmp_path) == [(4096, 3096), (5000, 1000)]
    assert available_bytes(tmp_path) == 1000
    (task.parent.parent / "memory.stat").write_text(f"anon 3\n{cached}\n")
    assert available_bytes(tmp_path) == 1100
    (tmp_path / "sys" / "fs" / "cgroup" / top / "job" / limit).write_text(unbounded)
    assert available_bytes(tmp_path) == 3096


@pytest.mark.parametrize(
    ("rank", "local_rank", "here", "trains", "asked"),
    [
        (0, 0, 3, range(1, 5), 100 + 2 * 10),  # the server, and two of the ranks that train
        (1, 1, 3, range(1, 5), 0),  # for whom rank 0 has spoken
        (3, 0, 2, range(1, 5), 2 * 10),  # no server is here
        (4, 1, 2, range(1, 5), 0),
        (0, 0, 3, range(5), 100 + 3 * 10),
        (0, 0, 1, [0], 100 + 10),  # one process
        (0, 0, 1, range(1, 5), 100),
    ],
)
def test_a_host_is_asked_for_what_its_own_ranks_need(monkeypatch, rank, local_rank, here, trains, asked):
    needed = {"rank 0": 100, "a training rank": 10, "of which client state": 1}
    job = Job("mpi", rank, 5, local_rank, here, "here")
    for free in (asked - 1, asked):
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        if free >= asked:
            memory.check(needed, job, trains)
        elif asked:
            with pytest.raises(UserError, match=f"on this host need about {asked} B, but {free} B are free"):
                memory.check(needed, job, trains)


@pytest.mark.parametrize(
    ("rank", "size", "trains", "asked"),
    [
        (0, 1, [0], 100 + 10),  # one process, whose server is on its GPU
        (0, 3, range(1, 3), 0),  # with gloo it is on the host
        (0, 3, range(3), 10),
        (2, 3, range(3), 10),
    ],
)
def test_a_gpu_is_asked_for_what_lies_there(monkeypatch, rank, size, trains, asked):
    needed = {"rank 0": 100, "a training rank": 10, "of which client state": 1}
    job = Job("torchrun", rank, size, rank, size, "here")
    for free in (asked - 1, asked):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu, free=free: (free, 1000))
        if free >= asked:
            memory.check(needed, job, trains, 2)
        elif asked:
            with pytest.raises(UserError, match=f"on GPU 2 need about {asked} B, but {free} B are free"):
                memory.check(needed, job, trains, 2)
