"""How much memory there is for the ranks of this host."""

import pytest

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
