"""Jobs in a real Slurm: ranks under srun, the sbatch files, a missing srun, and a rank that fails."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import BIN, warm_env

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT_S = 600
pytestmark = pytest.mark.xdist_group("slurm")


@pytest.fixture
def submit(slurm_env, tmp_path):
    """Return a function that runs a batch file, where `fedmpi` is `body`, and returns exit code and log."""

    def run(body, file, *args, options=()):
        (tmp_path / "fedmpi").write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "fedmpi").chmod(0o755)
        (tmp_path / "launch").symlink_to(ROOT / "launch")
        env = warm_env(slurm_env | {"PYTHONPATH": str(ROOT)})
        env["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{slurm_env['PATH']}"
        say = {"env": env, "cwd": tmp_path, "check": True, "stdout": subprocess.PIPE, "text": True}
        job = subprocess.run(
            ["sbatch", "--parsable", "--output=log.txt", *options, str(file), *args], **say
        ).stdout.strip()
        began = time.monotonic()
        while time.monotonic() < began + LIMIT_S:  # sbatch --wait would look every ten seconds only
            shown = subprocess.run(["scontrol", "show", "job", job], **say).stdout
            state = re.search(r"JobState=(\w+)", shown).group(1)
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return int(re.search(r"ExitCode=(\d+)", shown).group(1)), (tmp_path / "log.txt").read_text()
            time.sleep(0.2)
        subprocess.run(["scancel", job], **say)
        raise AssertionError(f"job {job} is still {state} after {LIMIT_S} s")

    return run


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("srun.sbatch", ["--ntasks=3"]),
        ("mpirun.sbatch", ["--ntasks=3"]),
        ("torchrun.sbatch", ["--cpus-per-task=3"]),
    ],
)
def test_a_batch_file_starts_all_ranks_with_its_arguments(submit, file, options):
    code, log = submit('echo "args $*"', ROOT / "slurm" / file, "c.yaml", "name=two words", options=options)
    assert code == 0, log
    assert len(re.findall(r"args run c.yaml name=\S+-\d+ checkpoint.resume=auto name=two words", log)) == 3


def test_a_batch_script_without_srun_is_an_error_with_a_remedy(submit, tmp_path):
    (tmp_path / "mistake.sh").write_text("#!/bin/sh\nfedmpi run c.yaml\n")
    code, log = submit(
        f"exec {BIN}/fedmpi run {ROOT}/configs/quickstart.yaml", tmp_path / "mistake.sh", options=["--ntasks=4"]
    )
    assert code == 2
    assert "has 4 tasks (SLURM_NTASKS), but only one process was started: start it with `srun fedmpi run ...`" in log


def test_a_failed_rank_ends_the_whole_job(submit):
    code, log = submit(
        "[ $SLURM_PROCID = 1 ] && exit 3; sleep 3000", ROOT / "slurm" / "srun.sbatch", "c.yaml", options=["-n3"]
    )
    assert code != 0, log
    assert "Exited with exit code 3" in log  # and the two that sleep for longer than LIMIT_S did not hold it up
