"""What this machine cannot do is said before anything is imported or read."""

import os

import pytest

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import usable_cores
from fedmpi.config import resources

GOOD = """\
data: {source: digits, partition: {scheme: iid, clients: 4}}
model: {name: mlp}
method: {name: fedavg}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "run.yaml").write_text(GOOD)
    return lambda *overrides: config.load(tmp_path / "run.yaml", overrides)


def test_threads_are_at_most_the_cores_of_this_process(load, monkeypatch):
    monkeypatch.setattr(resources, "usable_cores", lambda: 3)
    resources.check(load("compute.threads=3"), writes=False)
    with pytest.raises(UserError, match=r"command line: compute\.threads=4: compute\.threads: 4 .* may use 3 core"):
        resources.check(load("compute.threads=4"), writes=False)


def test_cores_are_those_that_a_launcher_left(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system binds no process")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert usable_cores() == 1


def test_output_that_may_be_made(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "a" / "b", "."):  # `.` has no parts
        resources.check(load(f"output={place}"))
    assert not (tmp_path / "a").exists()


def test_output_below_a_file_or_without_permission(load, tmp_path, monkeypatch):
    (tmp_path / "f").write_text("")
    for place in ("f", "f/x"):
        with pytest.raises(UserError, match=r"output: .*/f is a file; it must be a directory"):
            resources.check(load(f"output={tmp_path / place}"))
    resources.check(load(f"output={tmp_path}/f"), writes=False)  # another rank writes, and has files of its own
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(UserError, match=r"output: .* cannot be written to; choose another output"):
        resources.check(load(f"output={tmp_path}/x"))
