"""The memory that is available to the ranks of a host, and the memory that a run needs."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import prepare, settings

from fedmpi.comm.launchers import Job
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import get_available_bytes, read_memory_limits
from fedmpi.flat import linear
from fedmpi.runtime import memory
from fedmpi.runtime.execute import exchange_rank_info


def test_available_memory_of_the_host(tmp_path):
    assert get_available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable: 5 kB\n")
    assert get_available_bytes(tmp_path) == 5 * 1024


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
def test_control_group_limits_count(tmp_path, row, top, limit, used, unbounded, cached):
    """The smallest limit of all parent control groups (v1 or v2) counts; cached files count as free memory."""
    task = tmp_path / "sys" / "fs" / "cgroup" / top / "job" / "step" / "task"
    task.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(row)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 8 kB\n")
    for place, bound, uses in ((task, unbounded, 50), (task.parent, 4096, 1000), (task.parent.parent, 5000, 4000)):
        (place / limit).write_text(f"{bound}\n")
        (place / used).write_text(f"{uses}\n")
    assert read_memory_limits(tmp_path) == [(4096, 3096), (5000, 1000)]
    assert get_available_bytes(tmp_path) == 1000
    (task.parent.parent / "memory.stat").write_text(f"anon 3\n{cached}\n")
    assert get_available_bytes(tmp_path) == 1100
    (tmp_path / "sys" / "fs" / "cgroup" / top / "job" / limit).write_text(unbounded)
    assert get_available_bytes(tmp_path) == 3096


NEEDS = {"rank 0": 100, "a training rank": 10, "of which client state": 1}


def ranks(places, free, needs=NEEDS):
    """Return facts about ranks, each on one of these hosts or host/GPU pairs. free: place -> bytes."""
    facts = {}
    for rank, place in enumerate(places):
        host, _, gpu = place.partition("/")
        left = {"host": free.get(host), "gpu": free.get(place) if gpu else None}
        facts[rank] = {"host": host, "gpu": gpu, "needs": needs, "free": left}
    return facts


@pytest.mark.parametrize(
    ("places", "trains", "on_gpu", "asked"),
    [
        (["a"], [0], False, {"a": 110}),  # one process
        (["a", "a", "a"], [1, 2], False, {"a": 100 + 2 * 10}),
        (["a", "b", "b", "c"], [1, 2, 3], False, {"a": 100, "b": 2 * 10, "c": 10}),
        (["a/x"], [0], True, {"a/x": 110}),  # the server of one process is on its GPU
        (["a/x", "a/y", "b/z"], [1, 2], False, {"a": 100, "a/y": 10, "b/z": 10}),  # with gloo it is on the host
        (["a/x", "a/y", "b/z"], [0, 1, 2], True, {"a/x": 110, "a/y": 10, "b/z": 10}),  # with NCCL it is on its GPU
        (["a/x", "a/x", "a/y"], [1, 2], True, {"a/x": 100 + 10, "a/y": 10}),  # ranks that share a GPU
    ],
)
def test_each_host_and_each_gpu_needs_memory_for_its_ranks(places, trains, on_gpu, asked):
    for place, count in asked.items():
        memory.check_memory(ranks(places, dict(asked)), trains, on_gpu)
        host, _, gpu = place.partition("/")
        where = f"GPU {gpu} of host {host}" if gpu else f"host {host}"
        with pytest.raises(UserError, match=f"on {where} needs? about {count} B, but {count - 1} B are free"):
            memory.check_memory(ranks(places, {**asked, place: count - 1}), trains, on_gpu)
        memory.check_memory(
            ranks(places, {k: v for k, v in asked.items() if k != place}), trains, on_gpu
        )  # it is not known


def test_the_smallest_measurement_of_shared_memory_counts():
    """Each rank has its own needs, since the clients of sites differ."""
    facts = ranks(["a/x", "a/x", "a/x"], {"a": 1000, "a/x": 30})
    facts[2] |= {"needs": NEEDS | {"a training rank": 15}, "free": {"host": 1000, "gpu": 24}}
    with pytest.raises(UserError, match="2 training ranks on GPU x of host a need about 25 B, but 24 B are free"):
        memory.check_memory(facts, [1, 2], False)


@pytest.mark.parametrize(
    ("rank", "local_rank", "here", "trains", "asked"),
    [
        (0, 0, 3, False, ["rank 0", *["a training rank"] * 2]),
        (3, 0, 2, False, ["a training rank"] * 2),  # no server is here
        (0, 0, 3, True, ["rank 0", *["a training rank"] * 3]),
    ],
)
def test_the_memory_of_a_host_is_checked_before_ranks_connect(monkeypatch, rank, local_rank, here, trains, asked):
    """`fedmpi validate`, `doctor` and `plan` check the memory in one process."""
    made = prepare(settings(server={"trains_clients": trains}, compute={"device": "cpu"})).experiment
    job = Job("mpi", rank, 5, local_rank, here, "here")
    total = sum(memory.estimate_memory(made, 5, False)[part] for part in asked)
    monkeypatch.setattr(memory, "get_available_bytes", lambda: total)
    assert memory.check_host_memory(made, job) == memory.estimate_memory(made, 5, False)
    monkeypatch.setattr(memory, "get_available_bytes", lambda: total - 1)
    with pytest.raises(UserError, match=r"on host here needs? about"):
        memory.check_host_memory(made, job)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_rank_raises_the_same_memory_error(monkeypatch, on_gpu):
    """Two ranks share a GPU that has memory for one; with NCCL it also stores the uploads of rank 0."""
    made = prepare(settings(compute={"device": "cpu"})).experiment
    needs = memory.estimate_memory(made, 3, on_gpu)
    left = needs["rank 0"] * on_gpu + 2 * needs["a training rank"]
    device = SimpleNamespace(type="cuda" if on_gpu else "cpu")

    def facts_of(rank, left):
        def allgather(payload, timeout_s):
            mine = json.loads(payload)
            assert mine["needs"] == needs
            return [json.dumps({**mine, "gpu": "x", "free": {"host": 10**12, "gpu": left}}).encode()] * 3

        comm = SimpleNamespace(rank=rank, size=3, device=device, can_regroup="", allgather_bytes=allgather)
        job = Job("slurm", rank, 3, rank, 3, "a")
        return exchange_rank_info(made, job, comm, torch.device("cpu"))

    messages = set()
    for rank in range(3):
        assert [each["gpu"] for each in facts_of(rank, left)] == ["x"] * 3
        with pytest.raises(UserError, match="2 training ranks on GPU x of host a need about") as refused:
            facts_of(rank, left - 1)
        messages.add(str(refused.value))
    assert len(messages) == 1


def test_float64_copies_are_counted(monkeypatch):
    """Sums over the rows on rank 0 are computed in chunks of columns, whose size is bounded on a GPU."""
    made = prepare(settings("fedavg", cohort={"fraction": 1.0}, server={"rule": "median"})).experiment
    rows, width = 7, made.messages.max_upload_size()
    assert linear.scratch_bytes(rows, width, False) >= 8 * rows * width
    monkeypatch.setattr(linear, "SCRATCH_ENTRIES_GPU", 64 * rows)
    needs = [memory.estimate_memory(made, 1, on_gpu)["rank 0"] for on_gpu in (False, True)]
    assert needs[1] - 8 * rows * 64 == needs[0] - linear.scratch_bytes(rows, width, False)
    rest = made.itemsize * (
        rows * width + made.messages.broadcast_layout().packing.size + made.messages.server_state.size
    )
    model = made.itemsize * (made.messages.sizes["d"] + made.messages.sizes["b"])
    assert needs[1] == rest + 3 * model + 8 * rows * 64


def test_scratch_memory_is_bounded_by_the_chunks_in_use(monkeypatch):
    monkeypatch.setattr(linear, "count_usable_cores", lambda: 64 * torch.get_num_threads())
    chunk = 8 * 1000 * linear.CHUNK
    threads = {1: 1, 3: 1, 4: 4, 8: 8, 64: 64, 1000: 64}
    assert {n: linear.scratch_bytes(1000, n * linear.CHUNK, False) / chunk for n in threads} == threads
    assert linear.scratch_bytes(1000, 1 << 25, True) <= 8 * linear.SCRATCH_ENTRIES_GPU
    assert linear.scratch_bytes(10, 1 << 25, True) == 80 * linear.CHUNK_GPU
