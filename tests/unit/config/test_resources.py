"""What this machine cannot do is said before anything is imported or read."""

import os

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import count_usable_cores
from fedmpi.config import resources


def test_more_threads_than_cores_are_refused(monkeypatch):
    monkeypatch.setattr(resources, "count_usable_cores", lambda: 3)
    resources.check_threads_and_output_dir(settings(compute={"threads": 3}), writes=False)
    with pytest.raises(UserError, match=r"compute\.threads: 4 .* must be at most 3, the number of cores"):
        resources.check_threads_and_output_dir(settings(compute={"threads": 4}), writes=False)


def test_cores_respect_the_affinity_set_by_a_launcher(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system binds no process")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert count_usable_cores() == 1


def test_output_must_be_a_writable_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "a" / "b", "."):  # `.` has no parts
        resources.check_threads_and_output_dir(settings(output=str(place)))
    assert not (tmp_path / "a").exists()
    (tmp_path / "f").write_text("")
    for place in ("f", "f/x"):
        with pytest.raises(UserError, match=r"output: .*/f is a file; choose another output directory"):
            resources.check_threads_and_output_dir(settings(output=str(tmp_path / place)))
    resources.check_threads_and_output_dir(
        settings(output=f"{tmp_path}/f"), writes=False
    )  # another rank writes, and has files of its own
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(UserError, match=r"output: .* is not writable; choose another output"):
        resources.check_threads_and_output_dir(settings(output=f"{tmp_path}/x"))
