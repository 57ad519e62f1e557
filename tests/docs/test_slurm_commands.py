"""Run each srun and sbatch command of the pages in a Slurm (doc_commands.py)."""

import re
import time

import pytest
from doc_commands import BATCH, COMMANDS, run, shortened


@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("line", [line for line in COMMANDS if line.split()[0] in BATCH])
def test_slurm_command(checkout, slurm_env, line):
    program, *arguments = shortened(line)
    if program == "srun":
        output = run([program, *arguments], checkout, **slurm_env)
        assert ("round 1/1" if "run" in arguments else "started") in output
        return
    job = run(["sbatch", "--parsable", "--output=%j.log", *arguments], checkout, **slurm_env).strip()
    states = {"PENDING"}
    while states & {"PENDING", "RUNNING", "COMPLETING"}:  # sbatch --wait would look every ten seconds only
        time.sleep(0.2)
        states = {*re.findall(r"JobState=(\w+)", run(["scontrol", "show", "job", job], checkout, **slurm_env))}
    logs = [path.read_text() for path in checkout.glob(f"*{job}*.log")]
    assert states == {"COMPLETED"}, logs
    assert len(logs) == (3 if any(word.startswith("--array") for word in arguments) else 1)
    assert all("round 1/1" in log for log in logs)
