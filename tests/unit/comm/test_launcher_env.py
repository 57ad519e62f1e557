"""Launchers, as their environments were seen: Open MPI 5.0.11, MPICH 5.0.2, prterun, torchrun 2.13, Slurm 22.05."""

import pytest

from fedmpi.comm.launchers import launcher_env as job_module
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.launchers.launcher_env import detect, tasks_per_node
from fedmpi.common.errors import UserError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PRTE_LAUNCHED": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "5", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
BATCH = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {
    "SLURM_NTASKS": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(job_module.socket, "gethostname", lambda: "a02")


@pytest.mark.parametrize(
    ("launcher", "env"),
    [
        ("mpi", OPEN_MPI),
        ("mpi", MPICH),
        ("mpi", CRAY),
        ("torchrun", TORCHRUN),
        ("slurm", STEP),
        ("slurm", STEP | {"PMI_RANK": "3", "PMI_SIZE": "5", "PMI_FD": "11"}),  # srun --mpi=pmi2
        ("slurm", STEP | {"PMIX_RANK": "3"}),  # srun --mpi=pmix
        ("mpi", BATCH | OPEN_MPI),  # mpirun in a batch script
        ("torchrun", BATCH | TORCHRUN),  # torchrun in a batch script, by srun, in an MPI session
        ("torchrun", STEP | TORCHRUN),
        ("torchrun", OPEN_MPI | TORCHRUN),
        ("mpi", STEP | MPICH),  # hydra starts its proxies by srun
    ],
)
def test_launcher(launcher, env):
    assert detect(env) == Job(launcher, rank=3, size=5, local_rank=1, local_size=2, host="a02")


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},  # somebody's leftovers
        BATCH | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "12"},  # salloc without a number of tasks
        STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},  # srun -n 1
    ],
)
def test_single(env):
    assert detect(env) == Job("single", 0, 1, 0, 1, "a02")


@pytest.mark.parametrize(
    "env", [{"PMIX_RANK": "3"}, BATCH | {"PMIX_RANK": "3"}, STEP | {"PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}]
)
def test_pmix_alone_knows_no_size_so_mpi_is_asked(env, monkeypatch):
    answer = Job("mpi", 3, 5, 1, 2, "a02")
    monkeypatch.setattr(job_module, "ask_mpi", lambda: answer)
    assert detect(env) is answer


@pytest.mark.parametrize("env", [BATCH, BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_without_srun_is_told_its_cure(env):
    with pytest.raises(UserError, match="4 tasks allocated but world size 1: start it with `srun fedmpi run"):
        detect(env)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE = 'five'"):
        detect(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "five"})


def test_tasks_per_node():
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("2(x3),1,10(x2)") == [2, 2, 2, 1, 10, 10]
