"""Two jobs never go on with one run directory at once."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import yaml
from helpers import BIN, ROOT, clean_env, fedmpi, settings

from fedmpi.common.errors import UserError
from fedmpi.runtime.record import lock
from fedmpi.runtime.resuming import resume

CONFIG = {
    "name": "run",
    "rounds": 100_000,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
    "model": {"name": "logistic"},
    "method": {"name": "scaffold"},
}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_second_is_told_who_holds_it_and_the_lock_ends_with_its_holder(tmp_path):
    with lock.held(tmp_path):
        before = contents(tmp_path)
        with pytest.raises(UserError) as caught, lock.held(tmp_path):
            pass
        host = json.loads((tmp_path / "lock").read_text())["host"]
        assert str(caught.value).startswith(f"{tmp_path} is in use: process {os.getpid()} on host {host} has had it")
        assert contents(tmp_path) == before
    with lock.held(tmp_path):
        pass


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="this file system has no locks"), lock.held(tmp_path):
        pass


@pytest.mark.parametrize("how", ["auto", "must"])
def test_a_job_that_has_not_said_yet_what_it_is(tmp_path, how):
    """No second directory beside it; if it died at once, its place is taken."""
    (tmp_path / "run").mkdir()
    config = settings(output=str(tmp_path), checkpoint={"resume": how})
    with lock.held(tmp_path / "run"), ExitStack() as mine, pytest.raises(UserError, match="is in use"):
        resume.directory(config, {}, mine)
    with ExitStack() as mine:
        if how == "must":
            with pytest.raises(UserError, match="holds no run to go on with"):
                resume.directory(config, {}, mine)
        else:
            assert resume.directory(config, {}, mine)[0].path == tmp_path / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("kind", "size"), [("alone", 1), ("mpirun", 2)])
def test_a_run_that_lives_is_not_gone_on_with(tmp_path, kind, size):
    """Stopped meanwhile, so that nothing but the second job could touch the directory. Killed, it has no lock."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(tmp_path)}))
    first = subprocess.Popen(
        [str(BIN / "fedmpi"), "run", str(tmp_path / "run.yaml")],
        env=clean_env(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        run, began = tmp_path / "run", time.monotonic()
        while not (run / "metrics.jsonl").exists():
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        before = contents(run)
        done = fedmpi("resume", run, kind=kind, size=size)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error:") == 1
        assert f"{run} is in use: process {first.pid} on host" in done.stderr
        assert contents(run) == before
    finally:
        first.kill()
        first.wait()
    if kind == "alone":
        rounds = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["round"] + 3
        done = fedmpi("resume", run, f"rounds={rounds}")
        assert done.returncode == 0, done.stderr


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(lock.os, "pwrite", Mock(side_effect=full))
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}/lock: No space left"), lock.held(tmp_path):
        pass
