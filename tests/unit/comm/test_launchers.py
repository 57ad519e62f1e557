"""Detection of launchers in recorded environments.

Open MPI 5.0.11, MPICH 5.0.2, prterun, torchrun 2.13, Slurm 22.05.
"""

import pytest

from fedmpi.comm import launchers
from fedmpi.comm.launchers import (
    Job,
    detect,
    explain_why_failure_ends_job,
    get_first_host,
    parse_tasks_per_node,
    resolve_slurm_node,
)
from fedmpi.common.errors import UserError


def rank_variables(names, values="3512"):
    """Return variables with these names for rank, size, local rank and local size."""
    return dict(zip(names.split(), values, strict=True))


OMPI = "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
OPEN_MPI = rank_variables(OMPI) | {"PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}
MPICH = rank_variables("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS") | {"PMI_FD": "9"}
CRAY = rank_variables("PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE")
TORCHRUN = rank_variables("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE")
TORCHRUN |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
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
BY_ENV = {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "a01", "MASTER_PORT": "29500"}  # env://


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(launchers.socket, "gethostname", lambda: "a02")


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
        # RANK is the same in all processes that inherit it, while the launcher numbers them.
        ("slurm", STEP | BY_ENV | {"RANK": "0"}),
        ("mpi", OPEN_MPI | BY_ENV | {"RANK": "0"}),
        ("slurm", STEP | {"WORLD_SIZE": "1", "RANK": "0"}),
    ],
)
def test_a_launcher_is_detected(launcher, env):
    assert detect(env) == Job(launcher, rank=3, size=5, local_rank=1, local_size=2, host="a02")


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "12"},  # salloc without a number of tasks
        STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},  # srun -n 1
        BY_ENV | {"WORLD_SIZE": "1", "RANK": "0"},  # a PyTorchJob of one pod
        {"WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "MASTER_ADDR": "a01", "MASTER_PORT": "1"},  # set by a job's script
        {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"LSB_JOBID": "7"},
    ],
)
def test_a_single_process_is_detected(env):
    assert detect(env) == Job("single", 0, 1, 0, 1, "a02")


@pytest.mark.parametrize(
    ("more", "local_rank", "local_size"),
    [
        ({}, 0, 1),  # one rank a host, as pods of a Kubernetes job
        ({"LOCAL_RANK": "1"}, 1, 2),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1, 4),
        ({"MASTER_ADDR": "127.0.0.1"}, 3, 5),  # all on this host
        ({"MASTER_ADDR": "localhost"}, 3, 5),
        ({"RANK": "0", "MASTER_ADDR": "localhost"}, 0, 1),  # the master of a PyTorchJob, whose workers have its name
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}, 0, 1),  # started by ssh from a batch script
        ({"FLUX_JOB_SIZE": "5", "FLUX_TASK_RANK": "3"}, 0, 1),  # the remedy for launchers that are not supported
        ({"PMIX_RANK": "3"}, 0, 1),
        (rank_variables(OMPI, "0101"), 0, 1),  # an mpirun -n 1 on each host
    ],
)
def test_torch_variables_describe_a_job(more, local_rank, local_size):
    env = BY_ENV | more
    assert detect(env) == Job("env://", int(env["RANK"]), 5, local_rank, local_size, "a02")


UNSET_PORT = {name: text for name, text in BY_ENV.items() if name != "MASTER_PORT"}
ONLY_NUMBERS = {"RANK": "3", "WORLD_SIZE": "5"}
ONLY_ADDRESS = {"MASTER_ADDR": "a01", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (BATCH, "has 4 tasks \\(SLURM_NTASKS\\), but only one process was started: start it with `srun fedmpi run"),
        (
            BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            "has 4 tasks \\(SLURM_NTASKS\\), but only one process was started",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "five"}, "OMPI_COMM_WORLD_SIZE: 'five'"),
        # A launcher that does not tell how many ranks there are.
        ({"PMIX_RANK": "0"}, r"PMIX_RANK=0.*\n.*mpirun, srun or torchrun.*unset PMIX_RANK"),
        (STEP | {"PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}, "PMIX_RANK=3"),
        # An incomplete or impossible set of variables.
        (UNSET_PORT, "but not MASTER_PORT: .*unset RANK WORLD_SIZE MASTER_ADDR"),
        (UNSET_PORT | {"MASTER_PORT": ""}, "but not MASTER_PORT: .*unset RANK WORLD_SIZE MASTER_ADDR"),
        (ONLY_NUMBERS, "RANK=3, WORLD_SIZE=5 are set, but not MASTER_ADDR and MASTER_PORT"),
        (ONLY_ADDRESS, "MASTER_ADDR=a01, MASTER_PORT=29500 are set, but not RANK and WORLD_SIZE"),
        (BY_ENV | {"RANK": "5"}, "environment variable RANK: 5 is not allowed; must be from 0 to 4"),
        (BY_ENV | {"RANK": "-1"}, "RANK: '-1'"),
        (BY_ENV | {"MASTER_PORT": "0"}, "MASTER_PORT: 0 is not allowed; must be a port"),
        (BY_ENV | {"MASTER_PORT": "65536"}, "MASTER_PORT: 65536 is not allowed; must be a port"),
        (BY_ENV | {"MASTER_PORT": "http"}, "MASTER_PORT: 'http'"),
    ],
)
def test_invalid_variables_are_named_with_the_remedy(env, message):
    with pytest.raises(UserError, match=message):
        detect(env)


# Their variables: flux-environment(7); IBM's jsrun(1) and PyTorch Lightning's LSFEnvironment; MVAPICH2's user guide.
@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        ({"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1"}, "RANK=$FLUX_TASK_RANK WORLD_SIZE=$FLUX_JOB_SIZE"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0", "PMI_FD": "7"}, "RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "RANK=$MV2_COMM_WORLD_RANK WORLD_SIZE=$MV2_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "RANK=$OMPI_COMM_WORLD_RANK"),  # without the local ones
        ({"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1"}, "RANK=$JSM_NAMESPACE_RANK"),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "MV2_COMM_WORLD_SIZE": "4"}, "RANK=$MV2_COMM_WORLD_RANK"),
    ],
)
def test_ranks_of_other_launchers_do_not_train_alone(env, remedy):
    with pytest.raises(UserError, match=r"each process would train alone.*\n.*mpirun, srun or torchrun") as caught:
        detect(env)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("launcher", "env", "reason"),
    [
        ("torchrun", {}, "torchrun ends all ranks"),
        ("mpi", {}, "mpirun ends all ranks"),
        ("mpi", {"OMPI_MCA_mpi_ft_enable": "1"}, ""),
        ("slurm", {"SLURM_KILL_BAD_EXIT": "1"}, "--kill-on-bad-exit=0"),
        ("slurm", {}, ""),
    ],
)
def test_which_launchers_let_a_job_continue_without_a_rank(launcher, env, reason):
    why = explain_why_failure_ends_job(Job(launcher, 1, 3, 1, 3, "here"), env)
    assert reason in why
    assert bool(reason) == bool(why)


def test_tasks_per_node():
    assert parse_tasks_per_node("4") == [4]
    assert parse_tasks_per_node("2(x3),1,10(x2)") == [2, 2, 2, 1, 10, 10]


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [
        ("vm", "vm"),
        ("a-1.example.org,c", "a-1.example.org"),
        ("a[01-03,7],b2", "a01"),
        ("n[098-101]x", "n098x"),
        ("r[1-2]n[1-2],login", "r1n1"),
    ],
)
def test_first_host_of_a_slurm_host_list(hostlist, first):
    assert get_first_host(hostlist) == first


@pytest.mark.parametrize(
    ("name", "master", "expected"),
    [
        ("192.0.2.5", "192.0.2.9", "192.0.2.5"),  # the host list's own name comes first
        ("localhost", "192.0.2.9", "192.0.2.9"),  # a name that leads to the loopback interface of each host
        ("localhost", "", "127.0.0.1"),
        ("unknown.invalid", "192.0.2.9", "192.0.2.9"),
    ],
)
def test_a_node_without_an_address_uses_master_addr(name, master, expected):
    assert resolve_slurm_node(name, {"MASTER_ADDR": master}) == expected


def test_a_name_without_any_address_is_an_error():
    with pytest.raises(UserError, match=r"'unknown.invalid' \(rank 0's, from Slurm\) does not resolve"):
        resolve_slurm_node("unknown.invalid", {})
