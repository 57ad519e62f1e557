"""launch/*.sh: with a stand-in for `fedmpi` that prints how it was called, and with few programs on PATH."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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
SCRIPTS = [("local.sh", None), ("mpirun.sh", 3), ("torchrun.sh", 2)]


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def stand_in(tmp_path):
    """An environment in which `fedmpi` prints its threads and its arguments, one per bar."""
    # One write a rank: ranks share the launcher's output.
    program(tmp_path / "fedmpi", 'line=$OMP_NUM_THREADS\nfor each in "$@"; do line="$line|$each"; done\necho "$line"')
    names = ("OMP_NUM_THREADS", "SLURM_JOB_ID")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"VIRTUAL_ENV": "/of/tests", "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{env['PATH']}"}
    if not shutil.which("mpirun", path=env["PATH"]):
        pytest.skip("no mpirun on PATH")
    return env


@pytest.fixture
def slim_env(tmp_path):
    """An environment whose PATH holds PROGRAMS and the launchers, and nothing else."""
    path, env = tmp_path / "bin", clean_env()
    path.mkdir()
    for name in PROGRAMS.split():
        (path / name).symlink_to(shutil.which(name, path=env["PATH"]))
    for name in ("fedmpi", "mpirun", "torchrun"):
        if found := shutil.which(name, path=env["PATH"]):
            program(path / name, f'exec {found} "$@"')
    return env | {"PATH": str(path)}


def start(script, *args, env, **more):
    command = [str(ROOT / "launch" / script), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, **more)


@pytest.mark.smoke
@pytest.mark.parametrize(("script", "ranks"), SCRIPTS)
def test_every_rank_gets_the_command_as_given(script, ranks, stand_in):
    arguments = ["a config.yaml", "rounds=3", "name=two words"]
    done = start(script, *([ranks] if ranks else []), *arguments, env=stand_in)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == ["1|run|a config.yaml|rounds=3|name=two words"] * (ranks or 1), done.stderr
    assert done.returncode == 0
    if script == "local.sh":  # threads are the user's if set
        assert start(script, "c.yaml", env=stand_in | {"OMP_NUM_THREADS": "4"}).stdout == "4|run|c.yaml\n"


def test_ranks_that_end_without_a_run_are_no_success(stand_in, tmp_path):
    """Where ranks may die mpirun's exit code says nothing; rank 0's does, or that there is none."""
    lets_die = stand_in | {"FEDMPI_ULFM": "1"}
    done = start("mpirun.sh", 2, "c.yaml", env=lets_die)
    assert done.returncode == 1
    assert "the run did not finish" in done.stderr
    program(tmp_path / "fedmpi", '[ "$OMPI_COMM_WORLD_RANK" = 1 ] || echo "75 3" >"$FEDMPI_OUTCOME"')
    assert start("mpirun.sh", 2, "c.yaml", env=lets_die).returncode == AGAIN


def test_what_a_killed_mpirun_left_stops_no_other(stand_in, tmp_path):
    """Process numbers come again, in minutes on a busy machine: Open MPI refuses a number whose folder is there."""
    real = shutil.which("mpirun", path=stand_in["PATH"])
    if "Open MPI" not in subprocess.run([real, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("no mpirun of Open MPI on PATH")
    # What is left is there before the script looks, under the number that mpirun will have.
    leftover = f'touch "$left/pmix.$(hostname).tool.${{left##*.}}" {tmp_path}/asked'
    program(tmp_path / "rm", f'for left in "$@"; do :; done\nmkdir -p "$left"\n{leftover}\nexec /bin/rm "$@"')
    done = start("mpirun.sh", 1, "c.yaml", env=stand_in)
    assert (tmp_path / "asked").exists()
    assert (done.stdout, done.returncode) == ("1|run|c.yaml\n", 0), done.stderr


@pytest.mark.parametrize("place", ["here", "beside launch"])
@pytest.mark.parametrize(("script", "ranks"), SCRIPTS)
def test_venv_is_found_unless_another_environment_is_active(tmp_path, script, ranks, place):
    """As Slurm's scripts find it: a shell in which nothing is activated has no fedmpi."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    elsewhere.mkdir()
    tools = ((checkout if place != "here" else elsewhere) / ".venv", tmp_path / "active")
    for venv in tools:
        (venv / "bin").mkdir(parents=True)
        for name in ("fedmpi", "mpirun", "torchrun"):
            program(venv / "bin" / name, f"echo {venv.name} {name}")
        (venv / "bin" / "activate").write_text(f'VIRTUAL_ENV={venv}\nPATH="{venv}/bin:$PATH"\n')
    bare = {"PATH": "/usr/bin:/bin"}
    active = {"PATH": f"{tools[1]}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(tools[1])}
    command = [str(checkout / "launch" / script), *([str(ranks)] if ranks else []), "c.yaml"]
    for env, expected in ((bare, ".venv"), (active, "active")):
        done = subprocess.run(command, env=env, cwd=elsewhere, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{expected} {'fedmpi' if script == 'local.sh' else script[:-3]}\n", done.stderr


@pytest.mark.parametrize(("script", "args"), [("local.sh", []), ("mpirun.sh", ["c.yaml", "x=1"]), ("torchrun.sh", [3])])
def test_a_wrong_call_shows_the_usage(script, args, stand_in):
    done = start(script, *args, env=stand_in)
    assert done.returncode == 2
    assert f"launch/{script}" in done.stderr
    assert "CONFIG.yaml [key=value ...]" in done.stderr


@pytest.mark.parametrize("missing", ["mpirun", "torchrun"])
def test_a_missing_launcher_is_named(tmp_path, slim_env, missing):
    """The exit code was 0, as if the run had come to its end."""
    (tmp_path / "bin" / missing).unlink(missing_ok=True)
    done = start(f"{missing}.sh", 2, "run.yaml", env=slim_env)
    assert done.returncode == 127
    assert f"{missing} is not on PATH" in done.stderr


# ---- stopping ----
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
    program(tmp_path / "bin" / "torchrun", f": > {started}\nexec sleep 1000")
    job = subprocess.Popen([str(ROOT / "launch" / "torchrun.sh"), "2", "run.yaml"], env=slim_env)
    while not started.exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.terminate()
    assert job.wait(300) == AGAIN
