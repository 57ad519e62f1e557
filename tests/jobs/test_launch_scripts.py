"""launch/*.sh need no program that a slim image lacks."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import yaml
from helpers import ROOT, clean_env, gone, launcher, left_over

AGAIN = 75  # the run can be resumed
CONFIG = {
    "name": "run",
    "rounds": 100_000,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 3}},
    "model": {"name": "logistic"},
    "method": {"name": "fedavg"},
}
# What the scripts may call: bash, coreutils and sed. A slim image has no procps (pgrep, pkill, ps).
PROGRAMS = "bash sh env sed cat dirname head mkdir mktemp rm sleep"


@pytest.fixture
def slim_env(tmp_path):
    """An environment whose PATH holds PROGRAMS and the launchers, and nothing else."""
    path = tmp_path / "bin"
    path.mkdir()
    env = clean_env()
    for name in PROGRAMS.split():
        (path / name).symlink_to(shutil.which(name, path=env["PATH"]))
    for name in ("fedmpi", "mpirun", "torchrun"):
        if program := shutil.which(name, path=env["PATH"]):
            (path / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (path / name).chmod(0o755)
    return env | {"PATH": str(path)}


@pytest.mark.parametrize("kind", ["mpirun", pytest.param("torchrun", marks=pytest.mark.smoke)])
def test_a_script_that_is_told_to_stop_stops_its_ranks(tmp_path, slim_env, kind):
    launcher(kind, 2)  # or skip
    config, output, rows = tmp_path / "run.yaml", tmp_path / "output", tmp_path / "run" / "metrics.jsonl"
    config.write_text(yaml.safe_dump({**CONFIG, "output": str(tmp_path)}))
    script = [str(ROOT / "launch" / f"{kind}.sh"), "2", str(config)]
    with output.open("w") as file:
        job = subprocess.Popen(script, env=slim_env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while not rows.exists() or len(rows.read_text().splitlines()) < 2:
            assert job.poll() is None, output.read_text()
            assert time.monotonic() < until, output.read_text()
            time.sleep(0.05)
        job.terminate()
        assert job.wait(300) == AGAIN, output.read_text()
        assert gone(str(config))
        count = len(rows.read_text().splitlines())
        summary = json.loads(rows.with_name("summary.json").read_text())
        assert summary["rounds"] == count
        assert summary["exit_reason"] in ("stopped", f"signal {int(signal.SIGUSR1)}")
        assert sorted((rows.parent / "checkpoints").iterdir())[-1].name == f"{count - 1:06}.safetensors"
        assert "Traceback" not in output.read_text()
    finally:
        for pid in left_over(str(config)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert "not found" not in output.read_text()


def test_a_launcher_that_has_started_no_rank_is_ended(tmp_path, slim_env):
    """torchrun, for one, looks for minutes for a host name that does not resolve."""
    started = tmp_path / "started"
    (tmp_path / "bin" / "torchrun").write_text(f"#!/bin/sh\n: > {started}\nexec sleep 1000\n")
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    job = subprocess.Popen([str(ROOT / "launch" / "torchrun.sh"), "2", "run.yaml"], env=slim_env)
    while not started.exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.terminate()
    assert job.wait(300) == AGAIN


@pytest.mark.parametrize("missing", ["mpirun", "torchrun"])
def test_a_missing_launcher_is_named(tmp_path, slim_env, missing):
    """The exit code was 0, as if the run had come to its end."""
    (tmp_path / "bin" / missing).unlink(missing_ok=True)
    script = [ROOT / "launch" / f"{missing}.sh", "2", "run.yaml"]
    done = subprocess.run(script, env=slim_env, capture_output=True, text=True)
    assert done.returncode == 127
    assert f"there is no {missing} on PATH" in done.stderr
