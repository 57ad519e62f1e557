"""The main job in a real Slurm gives the bits of one process with each sbatch file."""

import json

import pytest
from helpers import warm_env
from real_job import hashes, succeed
from test_slurm_requeue import Cluster

pytestmark = pytest.mark.xdist_group("slurm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    succeed("run", "configs/quickstart.yaml", "rounds=3", f"output={folder}")
    return hashes(folder / "quickstart")


def submit(env, log, *words):
    """Run a batch file to its end; return state and exit code."""
    cluster = Cluster(warm_env(env), log.parent)
    job = cluster.say("sbatch", "--parsable", f"--output={log}", *words)
    state, _ = cluster.ended(job)
    return state, int(cluster.fact(job, "ExitCode").partition(":")[0])


@pytest.mark.parametrize(
    ("file", "options", "overrides"),
    [
        pytest.param("srun.sbatch", ["--ntasks=3"], [], marks=pytest.mark.smoke),
        ("mpirun.sbatch", ["--ntasks=3"], ["comm.backend=mpi"]),
        ("torchrun.sbatch", ["--cpus-per-task=3"], []),
    ],
)
def test_a_real_job_gives_the_bits_of_one_process(slurm_env, tmp_path, alone, file, options, overrides):
    log = tmp_path / "log.txt"
    settings = ["configs/quickstart.yaml", "rounds=3", f"output={tmp_path}", "name=quickstart", *overrides]
    state, code = submit(slurm_env, log, *options, f"slurm/{file}", *settings)
    assert (state, code) == ("COMPLETED", 0), log.read_text()
    assert hashes(tmp_path / "quickstart") == alone
    environment = json.loads((tmp_path / "quickstart" / "environment.json").read_text())
    assert environment["launcher"] == {"srun": "slurm", "mpirun": "mpi", "torchrun": "torchrun"}[file.split(".")[0]]
    assert len(environment["ranks"]) == 3
    lines = log.read_text().splitlines()
    assert sum(line.startswith("round ") for line in lines) == 3  # one plain line a round
    assert "\x1b" not in log.read_text()


def test_a_mistake_ends_a_real_job(slurm_env, tmp_path):
    log = tmp_path / "log.txt"
    settings = ["configs/quickstart.yaml", "data.partition.clients=5000", f"output={tmp_path}"]
    state, code = submit(slurm_env, log, "--ntasks=3", "slurm/srun.sbatch", *settings)
    assert state == "FAILED"  # the code is srun's: the largest, that of the ranks it ended
    assert code != 0
    assert log.read_text().count("error: data.partition") == 1, log.read_text()
    assert "Traceback" not in log.read_text()
