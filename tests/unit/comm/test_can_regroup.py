"""Where a job can go on without a lost rank, and the reasons where it cannot."""

import pytest
import torch

from fedmpi.comm.backends.torch_dist import Nccl
from fedmpi.comm.base import Lost, Solo
from fedmpi.comm.launchers import launcher_env
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.timeouts import Timeouts


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
def test_launchers(launcher, env, reason):
    found = launcher_env.survivors(Job(launcher, 1, 3, 1, 3, "here"), env)
    assert reason in found
    assert bool(reason) == bool(found)


def test_one_rank_and_nccl_cannot_regroup():
    solo = Solo(torch.device("cpu"))
    assert solo.alive == [0]
    assert solo.can_regroup == "there is a single process"
    with pytest.raises(Lost, match="there is a single process"):
        solo.regroup(b"", 1)
    nccl = Nccl(Job("slurm", 1, 3, 1, 3, "here"), torch.device("cpu"), None, Timeouts(round=60))
    assert "NCCL cannot" in nccl.can_regroup
    assert nccl.patience_s == 60
