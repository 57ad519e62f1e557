"""Who a process is among the ranks of a job."""

from dataclasses import dataclass

from fedmpi.common import parent

RANK = {  # launcher -> what it calls a rank
    "torchrun": ("RANK",),
    "mpi": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "slurm": ("SLURM_PROCID",),
}


@dataclass(frozen=True)
class Job:
    launcher: str  # torchrun | mpi | slurm | env:// | single
    rank: int  # 0 .. size-1, over all hosts
    size: int
    local_rank: int  # 0 .. local_size-1, on this host
    local_size: int
    host: str

    def launcher_pid(self) -> int:
        return parent.launcher(RANK.get(self.launcher, ()))
