"""Communication between the ranks of a job: `detect` reads the launcher's variables, and `connect` connects the ranks.

Modules that need torch are imported at first use, so that a mistake in a config is reported before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedmpi.comm import network
from fedmpi.comm.failures.error_reporter import ErrorReporter
from fedmpi.comm.launchers import Job, detect
from fedmpi.comm.timeouts import Timeouts

if TYPE_CHECKING:
    import torch

    from fedmpi.comm.base import Communicator, RankLostError

__all__ = ["Communicator", "Job", "RankLostError", "Timeouts", "connect", "detect"]


def connect(
    job: Job,
    backend: str = "auto",
    device: torch.device | None = None,
    timeouts: Timeouts | None = None,
    error_reporter: ErrorReporter | None = None,
    interface: str | Sequence[str] | None = None,
) -> Communicator:
    """Connect this process to all ranks of a job and return its communicator.

    Args:
        job: this process's rank, and the number of ranks.
        backend: auto, nccl, gloo or mpi; auto selects NCCL if every rank has a GPU of its own, otherwise gloo.
        device: the device that this rank computes on (default: CPU).
        timeouts: time limits in seconds, for example `start` for the arrival of all ranks and `round` for one message.
        error_reporter: reports errors to all ranks. It is active from the time the ranks' store is found until the
            communicator is closed.
        interface: network interface for gloo, NCCL and the TCP messages of Open MPI: a name or pattern, or a list of
            them.

    Raises:
        UserError: the launcher or the config contains a mistake.
        RankLostError: ranks did not arrive in time; the message names them.
    """
    import torch

    from fedmpi.comm.base import SingleProcess

    device = device or torch.device("cpu")
    if job.size == 1:
        return SingleProcess(device)
    address = ""
    if interface:
        name, address = network.choose_interface(interface)
        network.set_interface_variables(name, os.environ)
    timeouts = timeouts or Timeouts()
    error_reporter = error_reporter or ErrorReporter(job, timeouts)
    if backend == "mpi":
        comm = _connect_by_mpi(job, timeouts, error_reporter, address)
    else:
        from fedmpi.comm.backends import torch_dist

        comm = torch_dist.connect(job, backend, device, timeouts, error_reporter, address)
    comm.on_close = error_reporter.close
    error_reporter.waiting_for = lambda: comm.waiting_for
    return comm


def _connect_by_mpi(job: Job, timeouts: Timeouts, error_reporter: ErrorReporter, address: str) -> Communicator:
    from fedmpi.comm.backends import mpi
    from fedmpi.comm.base import RankLostError
    from fedmpi.comm.rendezvous import lookup

    comm = mpi.MpiCommunicator(job, mpi.initialize_mpi(job, timeouts.start), timeouts)
    with suppress(
        RankLostError
    ):  # MPI does not need TCP between the hosts; without TCP, each rank reports its own errors
        by_mpi, limit_s = replace(job, launcher="mpi"), min(timeouts.start, timeouts.store)
        store = lookup.connect_to_store(by_mpi, limit_s, timeouts=timeouts, interface=address)
        error_reporter.listen(store.open_connection)
    return comm


def __getattr__(name: str) -> Any:
    if name not in ("Communicator", "RankLostError"):
        raise AttributeError(f"module 'fedmpi.comm' has no attribute {name!r}")
    from fedmpi.comm import base

    return getattr(base, name)
