"""Who a process is among the ranks of a job."""

import os
from dataclasses import dataclass, field

from fedmpi.common.launcher_process import find_launcher

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
    # The parent of this process, found as early as possible: once it is dead, another process takes its place.
    parent_pid: int = field(default_factory=os.getppid, compare=False, repr=False)

    def launcher_pid(self) -> int:
        return find_launcher(self.parent_pid, RANK.get(self.launcher, ()))
