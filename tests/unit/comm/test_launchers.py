"""Launchers, as their environments were seen: Open MPI 5.0.11, MPICH 5.0.2, prterun, torchrun 2.13, Slurm 22.05."""

import pytest

from fedmpi.comm import launchers
from fedmpi.comm.job import Job
from fedmpi.comm.launchers import address_of_node, detect, first_host, survivors, tasks_per_node
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
    ],
)
def test_launcher(launcher, env):
    assert detect(env) == Job(launcher, rank=3, size=5, local_rank=1, local_size=2, host="a02")


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "12"},  # salloc without a number of tasks
        STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},  # srun -n 1
    ],
)
def test_single(env):
    assert detect(env) == Job("single", 0, 1, 0, 1, "a02")


@pytest.mark.parametrize(
    "env", [{"PMIX_RANK": "0"}, BATCH | {"PMIX_RANK": "3"}, STEP | {"PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}]
)
def test_pmix_alone_knows_no_size(env):
    with pytest.raises(UserError, match=r"PMIX_RANK=\d.*\n.*mpirun, srun or torchrun.*unset PMIX_RANK"):
        detect(env)
    assert detect(env | BY_ENV).launcher == "env://"


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


# ---- env://: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT ----
BY_ENV = {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "a01", "MASTER_PORT": "29500"}


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
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 0, 1),  # an mpirun -n 1 on each host
    ],
)  # fmt: skip
def test_ranks_join_by_torchs_variables(more, local_rank, local_size):
    env = BY_ENV | more
    assert detect(env) == Job("env://", int(env["RANK"]), 5, local_rank, local_size, "a02")


@pytest.mark.parametrize(
    ("launcher", "env"),
    [("slurm", STEP), ("mpi", OPEN_MPI), ("torchrun", TORCHRUN | OPEN_MPI)],
)
def test_a_launcher_of_as_many_ranks_comes_before_inherited_variables(launcher, env):
    """RANK is the same in all processes that inherit it, while the launcher numbers them."""
    inherited = {} if launcher == "torchrun" else BY_ENV | {"RANK": "0"}
    assert detect(env | inherited) == Job(launcher, rank=3, size=5, local_rank=1, local_size=2, host="a02")
    assert detect(env | ({} if launcher == "torchrun" else {"WORLD_SIZE": "1", "RANK": "0"})).size == 5


@pytest.mark.parametrize(("starter", "env"), [("srun", STEP), ("mpirun", OPEN_MPI)])
def test_a_launcher_and_variables_that_disagree_are_refused(starter, env):
    with pytest.raises(UserError, match=f"{starter} started 5 ranks, but WORLD_SIZE=2.*\n.*unset RANK WORLD_SIZE"):
        detect(env | BY_ENV | {"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["MASTER_PORT"], "but not MASTER_PORT: .*unset RANK WORLD_SIZE MASTER_ADDR"),
        (["MASTER_ADDR", "MASTER_PORT"], "RANK=3, WORLD_SIZE=5 are set, but not MASTER_ADDR and MASTER_PORT"),
        (["RANK", "WORLD_SIZE"], "MASTER_ADDR=a01, MASTER_PORT=29500 are set, but not RANK and WORLD_SIZE"),
    ],
)
def test_an_incomplete_set_of_variables_names_the_missing_ones(missing, message):
    given = {name: text for name, text in BY_ENV.items() if name not in missing}
    with pytest.raises(UserError, match=message):
        detect(given)
    with pytest.raises(UserError, match=message):
        detect(given | dict.fromkeys(missing, ""))


@pytest.mark.parametrize(
    "env",
    [
        BY_ENV | {"WORLD_SIZE": "1", "RANK": "0"},  # a PyTorchJob of one pod
        {"WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "MASTER_ADDR": "a01", "MASTER_PORT": "1"},  # set by a job's script
    ],
)
def test_variables_of_one_process(env):
    assert detect(env) == Job("single", 0, 1, 0, 1, "a02")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"RANK": "5"}, "RANK=5, but WORLD_SIZE=5: ranks count from 0"),
        ({"RANK": "-1"}, "RANK = '-1'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT = 0: expected a port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536: expected a port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
    ],
)
def test_values_that_cannot_be_are_named(more, message):
    with pytest.raises(UserError, match=message):
        detect(BY_ENV | more)


# ---- launchers that are not supported ----
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
    "env",
    [{"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}, {"PMI_SIZE": "1", "PMI_RANK": "0"}, {"LSB_JOBID": "7"}],
)
def test_one_process_of_other_launchers(env):
    assert detect(env) == Job("single", 0, 1, 0, 1, "a02")


def test_flux_that_srun_started_is_not_taken_for_srun():
    """Its tasks inherit SLURM_PROCID from the broker: several of them have the same one."""
    with pytest.raises(UserError, match="srun started 5 ranks, but FLUX_JOB_SIZE=8"):
        detect(STEP | {"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "6"})


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
def test_which_launchers_let_a_job_outlive_a_rank(launcher, env, reason):
    why = survivors(Job(launcher, 1, 3, 1, 3, "here"), env)
    assert reason in why
    assert bool(reason) == bool(why)


# ---- Slurm's hosts ----
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
def test_the_first_of_slurms_hosts(hostlist, first):
    assert first_host(hostlist) == first


@pytest.mark.parametrize(
    ("name", "master", "expected"),
    [
        ("localhost.invalid", "", "192.0.2.7"),  # slurm.conf's NodeAddr
        ("localhost", "", "192.0.2.7"),  # a name that leads to the loopback interface of each host
        ("unknown", "192.0.2.9", "192.0.2.9"),
        ("192.0.2.5", "192.0.2.9", "192.0.2.5"),  # the host list's own name comes first
        ("unknown", "", UserError),
    ],
)
def test_a_name_that_leads_nowhere_has_the_address_of_slurm_or_of_the_job_script(tmp_path, name, master, expected):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = unknown ] || echo "NodeName=$3 NodeAddr=192.0.2.7 State=IDLE"\n')
    scontrol.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER_ADDR": master}
    if expected is UserError:
        with pytest.raises(UserError, match=r"'unknown' \(rank 0's, from Slurm\) does not resolve"):
            address_of_node(name, env)
    else:
        assert address_of_node(name, env) == expected
