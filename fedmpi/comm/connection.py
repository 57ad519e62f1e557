"""From a detected job to its communicator; the back ends are imported when they are chosen."""

from __future__ import annotations

import contextlib
import time

import torch

from fedmpi.comm.backends.solo import Solo
from fedmpi.comm.base import Communicator, Lost
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.loss import silence
from fedmpi.comm.loss.alarm import Alarm

TCP_S = 10.0  # allowed for a rank to reach rank 0 by TCP where all but the alarm goes over MPI


def connect(
    job: Job,
    backend: str = "auto",
    device: torch.device | None = None,
    start_timeout_s: float = 300,
    round_timeout_s: float = 1800,
    alarm: Alarm | None = None,
) -> Communicator:
    """The communicator of `job`, once all its ranks are there.

    backend           auto | nccl | gloo | mpi; auto is NCCL when every rank has a GPU of its own, else gloo
    device            where this rank computes (default: CPU)
    start_timeout_s   seconds until all ranks must be there; after that, Lost names the silent ones
    round_timeout_s   seconds for one message, including the training before it; after that, Lost names the peer
    alarm             told of the ranks' store as soon as it is found, hushed when the communicator is closed

    Raises UserError for a mistake in launcher or config, Lost for ranks that do not arrive.
    """
    device = device or torch.device("cpu")
    if job.size == 1:
        return Solo(device)
    alarm = alarm or Alarm(job)
    if backend == "mpi":
        from fedmpi.comm.backends import mpi_comm
        from fedmpi.comm.meeting import rendezvous

        mine = mpi_comm.connect(job, start_timeout_s, round_timeout_s)
        with contextlib.suppress(Lost):  # MPI needs no TCP between the hosts; without it each rank speaks for itself
            store = rendezvous.under_mpi(job, time.monotonic() + min(start_timeout_s, TCP_S))
            alarm.listen(lambda: rendezvous.another(store))
            mine.outlive(store, alarm)
        comm: Communicator = mine
    else:
        from fedmpi.comm.backends import torch_dist

        comm = torch_dist.connect(job, backend, device, start_timeout_s, round_timeout_s, alarm)
    comm.at_end = alarm.hush
    alarm.asked = lambda line, store: silence.answer(line, job.rank, comm.awaits, store)
    return comm
