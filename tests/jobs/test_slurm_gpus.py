"""The options with which fedmpi requests GPUs from a real Slurm: each rank sees the GPUs of all ranks on its node."""

import re
import shlex
import subprocess

import pytest
from helpers import ROOT
from real_job import succeed

from fedmpi.sweeps import expand, slurm

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.smoke]
SEES = 'echo "${CUDA_VISIBLE_DEVICES-all}"'
FILES = ("docs/hpc.md", "docs/cluster.md", "slurm/srun.sbatch")
ON_ONE_NODE = (
    (r"--nodes=2( --ntasks=8)?", r"--nodes=1\1"),
    ("--ntasks=8", "--ntasks=4"),
    (r"--cpus-per-task=\d+", "--cpus-per-task=1"),
)


def documented_commands():
    """Return options and batch file of each documented sbatch command with GPUs, for the small node of the tests."""
    for file in FILES:
        lines = re.findall(r"sbatch (.*--gpus.*? slurm/\w+\.sbatch)", (ROOT / file).read_text())
        assert lines, file
        for line in lines:
            for pattern, other in ON_ONE_NODE:
                line = re.sub(pattern, other, line)
            yield pytest.param(shlex.split(line), id=f"{file}: {line}")


@pytest.fixture
def say(slurm_env):
    def run_srun(*words, **more):
        return subprocess.run(words, env=slurm_env, cwd=ROOT, check=True, capture_output=True, text=True, **more).stdout

    if "gpu:8" not in run_srun("sinfo", "--noheader", "--format=%G"):
        pytest.skip("the Slurm that runs here has no eight GPUs on a node")
    return run_srun


def visible_gpus(said):
    """Return the GPUs of its node that each task printed."""
    return sorted(said.split())


@pytest.mark.parametrize("line", [*documented_commands()])
def test_documented_commands_show_all_gpus_to_each_rank(say, line):
    *options, file = line
    tasks = 1 if file == "slurm/torchrun.sbatch" else 4
    assert visible_gpus(say("srun", "--immediate=60", *options, "sh", "-c", SEES)) == ["0,1,2,3"] * tasks
    say("sbatch", "--test-only", *line, "configs/quickstart.yaml")  # beside the options in the file


def test_sweep_jobs_get_the_requested_gpus(say, tmp_path):
    (tmp_path / "sweep.yaml").write_text(f"base: [{ROOT}/configs/quickstart.yaml]\ngrid: {{seed: [0, 1]}}\n")
    found = expand.load_sweep(tmp_path / "sweep.yaml")
    text = slurm.build_array_script(found, slurm.ArrayOptions(ranks=2, gpus=2), ["a"], tmp_path, 1)
    say("sbatch", "--test-only", input=text)
    options = [option for option in re.findall(r"#SBATCH (.*)", text) if re.match("--(nodes|ntasks|gpus)", option)]
    assert visible_gpus(say("srun", "--immediate=60", *options, "sh", "-c", SEES)) == ["0,1,2,3"] * 2
    more = ("--option=--nodes=1-2", "--option=--gpus-per-node=1")  # the last one counts
    done = succeed("sweep", tmp_path / "sweep.yaml", "--sbatch", "--dry-run", "--ranks=2", "--gpus=1", *more)
    assert done.stdout.index("--gpus-per-node=2") < done.stdout.index("--gpus-per-node=1")


def test_gpus_per_task_would_hide_the_other_gpus(say):
    """This is why no documented command uses it."""
    words = ("srun", "--immediate=60", "--ntasks=4", "--gpus-per-task=1")
    assert visible_gpus(say(*words, "sh", "-c", SEES)) == ["0", "1", "2", "3"]
