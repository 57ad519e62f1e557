"""launch/*.sh with a stand-in for the `fedmpi` command that prints how it was called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stand_in(tmp_path):
    """An environment in which `fedmpi` prints its threads and its arguments, one per bar."""
    command = tmp_path / "fedmpi"
    # One write a rank: ranks share the launcher's output.
    command.write_text(
        '#!/bin/sh\nline=$OMP_NUM_THREADS\nfor each in "$@"; do line="$line|$each"; done\necho "$line"\n'
    )
    command.chmod(0o755)
    names = ("OMP_NUM_THREADS", "SLURM_JOB_ID")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return env | {"VIRTUAL_ENV": "/of/tests", "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{env['PATH']}"}


def start(script, *args, env):
    command = [str(ROOT / "launch" / script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.smoke
@pytest.mark.parametrize(("script", "ranks"), [("local.sh", None), ("mpirun.sh", 3), ("torchrun.sh", 2)])
def test_every_rank_gets_the_command_as_given(script, ranks, stand_in):
    if script == "mpirun.sh" and not shutil.which("mpirun", path=stand_in["PATH"]):
        pytest.skip("no mpirun on PATH")
    arguments = ["a config.yaml", "rounds=3", "name=two words"]
    done = start(script, *([str(ranks)] if ranks else []), *arguments, env=stand_in)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == ["1|run|a config.yaml|rounds=3|name=two words"] * (ranks or 1), done.stderr
    assert done.returncode == 0


def test_ranks_that_end_without_a_run_are_no_success(stand_in, tmp_path):
    """Where ranks may die mpirun's exit code says nothing; rank 0's does, or that there is none."""
    if not shutil.which("mpirun", path=stand_in["PATH"]):
        pytest.skip("no mpirun on PATH")
    lets_die = stand_in | {"FEDMPI_ULFM": "1"}
    done = start("mpirun.sh", "2", "c.yaml", env=lets_die)
    assert done.returncode == 1
    assert "did not come to its end" in done.stderr
    (tmp_path / "fedmpi").write_text('#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] || echo "75 3" >"$FEDMPI_OUTCOME"\n')
    assert start("mpirun.sh", "2", "c.yaml", env=lets_die).returncode == 75


def test_what_a_killed_mpirun_left_stops_no_other(stand_in, tmp_path):
    """Process numbers come again, in minutes on a busy machine: Open MPI refuses a number whose folder is there."""
    real = shutil.which("mpirun", path=stand_in["PATH"])
    if not real or "Open MPI" not in subprocess.run([real, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("no mpirun of Open MPI on PATH")
    # What is left is there before the script looks, under the number that mpirun will have.
    (tmp_path / "rm").write_text(
        f'#!/bin/sh\nfor left in "$@"; do :; done\nmkdir -p "$left"\n'
        f'touch "$left/pmix.$(hostname).tool.${{left##*.}}" {tmp_path}/asked\nexec /bin/rm "$@"\n'
    )
    (tmp_path / "rm").chmod(0o755)
    done = start("mpirun.sh", "1", "c.yaml", env=stand_in)
    assert (tmp_path / "asked").exists()
    assert (done.stdout, done.returncode) == ("1|run|c.yaml\n", 0), done.stderr


def test_threads_are_the_users_if_set(stand_in):
    assert start("local.sh", "c.yaml", env=stand_in | {"OMP_NUM_THREADS": "4"}).stdout == "4|run|c.yaml\n"


@pytest.mark.parametrize("place", ["here", "beside launch"])
@pytest.mark.parametrize(("script", "ranks"), [("local.sh", None), ("mpirun.sh", 1), ("torchrun.sh", 1)])
def test_venv_is_found_unless_another_environment_is_active(tmp_path, script, ranks, place):
    """As Slurm's scripts find it: a shell in which nothing is activated has no fedmpi."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    elsewhere.mkdir()
    tools = ((checkout if place != "here" else elsewhere) / ".venv", tmp_path / "active")
    for venv in tools:
        (venv / "bin").mkdir(parents=True)
        for name in ("fedmpi", "mpirun", "torchrun"):
            (venv / "bin" / name).write_text(f"#!/bin/sh\necho {venv.name} {name}\n")
            (venv / "bin" / name).chmod(0o755)
        (venv / "bin" / "activate").write_text(f'VIRTUAL_ENV={venv}\nPATH="{venv}/bin:$PATH"\n')
    bare = {"PATH": "/usr/bin:/bin"}
    active = {"PATH": f"{tools[1]}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(tools[1])}
    command = [str(checkout / "launch" / script), *([str(ranks)] if ranks else []), "c.yaml"]
    for env, expected in ((bare, ".venv"), (active, "active")):
        done = subprocess.run(command, env=env, cwd=elsewhere, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{expected} {'fedmpi' if script == 'local.sh' else script[:-3]}\n", done.stderr


@pytest.mark.parametrize(
    ("script", "args"), [("local.sh", []), ("mpirun.sh", ["c.yaml", "x=1"]), ("torchrun.sh", ["3"])]
)
def test_a_wrong_call_shows_the_usage(script, args, stand_in):
    done = start(script, *args, env=stand_in)
    assert done.returncode == 2
    assert f"launch/{script}" in done.stderr
    assert "CONFIG.yaml [key=value ...]" in done.stderr
