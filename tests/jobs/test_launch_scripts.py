"""launch/*.sh: with a replacement for `fedmpi` that prints its arguments, and with few programs on PATH."""

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
from helpers import ROOT, clean_env, find_processes, launcher, wait_until_ended

RESUMABLE = 75  # the run can be resumed
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
def env_with_fake_fedmpi(tmp_path):
    """Return an environment in which `fedmpi` prints its threads and its arguments, separated by bars."""
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
    """Return an environment whose PATH contains only PROGRAMS and the launchers."""
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
def test_every_rank_gets_the_same_command(script, ranks, env_with_fake_fedmpi):
    arguments = ["a config.yaml", "rounds=3", "name=two words"]
    done = start(script, *([ranks] if ranks else []), *arguments, env=env_with_fake_fedmpi)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == ["1|run|a config.yaml|rounds=3|name=two words"] * (ranks or 1), done.stderr
    assert done.returncode == 0
    if script == "local.sh":  # threads are the user's if set
        assert start(script, "c.yaml", env=env_with_fake_fedmpi | {"OMP_NUM_THREADS": "4"}).stdout == "4|run|c.yaml\n"


def test_ranks_that_end_without_a_run_are_a_failure(env_with_fake_fedmpi, tmp_path):
    """If ranks may die, mpirun's exit code is not used; rank 0's exit code, or its absence, decides."""
    lets_die = env_with_fake_fedmpi | {"FEDMPI_ULFM": "1"}
    done = start("mpirun.sh", 2, "c.yaml", env=lets_die)
    assert done.returncode == 1
    assert "the run did not finish" in done.stderr
    program(tmp_path / "fedmpi", '[ "$OMPI_COMM_WORLD_RANK" = 1 ] || echo "75 3" >"$FEDMPI_OUTCOME"')
    assert start("mpirun.sh", 2, "c.yaml", env=lets_die).returncode == RESUMABLE


def test_files_of_a_killed_mpirun_do_not_stop_a_later_one(env_with_fake_fedmpi, tmp_path):
    """Process ids repeat, within minutes on a busy machine; Open MPI does not start if the folder of its id exists."""
    real = shutil.which("mpirun", path=env_with_fake_fedmpi["PATH"])
    if "Open MPI" not in subprocess.run([real, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("no mpirun of Open MPI on PATH")
    # What is left is there before the script looks, under the number that mpirun will have.
    leftover = f'touch "$left/pmix.$(hostname).tool.${{left##*.}}" {tmp_path}/asked'
    program(tmp_path / "rm", f'for left in "$@"; do :; done\nmkdir -p "$left"\n{leftover}\nexec /bin/rm "$@"')
    done = start("mpirun.sh", 1, "c.yaml", env=env_with_fake_fedmpi)
    assert (tmp_path / "asked").exists()
    assert (done.stdout, done.returncode) == ("1|run|c.yaml\n", 0), done.stderr


@pytest.mark.parametrize("place", ["here", "beside launch"])
@pytest.mark.parametrize(("script", "ranks"), SCRIPTS)
def test_venv_is_found_unless_another_environment_is_active(tmp_path, script, ranks, place):
    """Like Slurm's scripts, they run in a shell without an active environment, where fedmpi is not on PATH."""
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
def test_wrong_arguments_print_the_usage(script, args, env_with_fake_fedmpi):
    done = start(script, *args, env=env_with_fake_fedmpi)
    assert done.returncode == 2
    assert f"launch/{script}" in done.stderr
    assert "CONFIG.yaml [key=value ...]" in done.stderr


@pytest.mark.parametrize("missing", ["mpirun", "torchrun"])
def test_a_missing_launcher_is_named(tmp_path, slim_env, missing):
    """The exit code must not be 0."""
    (tmp_path / "bin" / missing).unlink(missing_ok=True)
    done = start(f"{missing}.sh", 2, "run.yaml", env=slim_env)
    assert done.returncode == 127
    assert f"{missing} is not on PATH" in done.stderr


# ---- stopping ----
@pytest.mark.parametrize("kind", ["mpirun", pytest.param("torchrun", marks=pytest.mark.smoke)])
def test_a_script_forwards_a_stop_signal_to_its_ranks(tmp_path, slim_env, kind):
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
        assert job.wait(300) == RESUMABLE, output.read_text()
        assert wait_until_ended(str(config))
        count = len(rows.read_text().splitlines())
        summary = json.loads(rows.with_name("summary.json").read_text())
        assert summary["rounds"] == count
        assert summary["exit_reason"] in ("stopped", f"signal {int(signal.SIGUSR1)}")
        assert sorted((rows.parent / "checkpoints").iterdir())[-1].name == f"{count - 1:06}.safetensors"
        assert "Traceback" not in output.read_text()
    finally:
        for pid in find_processes(str(config)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert "not found" not in output.read_text()


def test_a_launcher_that_has_started_no_rank_is_ended(tmp_path, slim_env):
    """torchrun, for example, searches for minutes for a host name that does not resolve."""
    started = tmp_path / "started"
    program(tmp_path / "bin" / "torchrun", f": > {started}\nexec sleep 1000")
    job = subprocess.Popen([str(ROOT / "launch" / "torchrun.sh"), "2", "run.yaml"], env=slim_env)
    while not started.exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.terminate()
    assert job.wait(300) == RESUMABLE
