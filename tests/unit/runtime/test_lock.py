"""Two jobs never go on with one run directory at once."""

import errno
import fcntl
import json
import os
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
from helpers import settings

from fedmpi.common.errors import UserError
from fedmpi.runtime import checkpoints
from fedmpi.runtime.record import lock


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_second_is_told_who_holds_it_and_the_lock_ends_with_its_holder(tmp_path):
    with lock.hold(tmp_path):
        before = contents(tmp_path)
        with pytest.raises(UserError) as caught, lock.hold(tmp_path):
            pass
        host = json.loads((tmp_path / "lock").read_text())["host"]
        assert str(caught.value).startswith(f"{tmp_path} is in use: process {os.getpid()} on host {host} has had it")
        assert contents(tmp_path) == before
    with lock.hold(tmp_path):
        pass


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="this file system has no locks"), lock.hold(tmp_path):
        pass


@pytest.mark.parametrize("how", ["auto", "must"])
def test_a_job_that_has_not_said_yet_what_it_is(tmp_path, how):
    """No second directory beside it; if it died at once, its place is taken."""
    (tmp_path / "run").mkdir()
    config = settings(output=str(tmp_path), checkpoint={"resume": how})
    with lock.hold(tmp_path / "run"), ExitStack() as mine, pytest.raises(UserError, match="is in use"):
        checkpoints.open_directory(config, {}, mine)
    with ExitStack() as mine:
        if how == "must":
            with pytest.raises(UserError, match="holds no run to go on with"):
                checkpoints.open_directory(config, {}, mine)
        else:
            assert checkpoints.open_directory(config, {}, mine)[0].path == tmp_path / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(lock.json, "dumps", Mock(side_effect=full))
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}/lock: No space left"), lock.hold(tmp_path):
        pass
