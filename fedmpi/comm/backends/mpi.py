"""The communication back end MPI, through mpi4py; messages are sent from their buffers and never pickled.

No call blocks inside MPI, because most MPI libraries poll while they wait, which would take CPU time from ranks that
are training. Instead, requests are posted and then tested repeatedly until a deadline, with pauses in between.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm.base import (
    ALLGATHER_BYTES,
    START_REMEDY,
    Communicator,
    ConnectionLostError,
    Message,
    make_missing_ranks_error,
)
from fedmpi.comm.launchers import Job
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import UserError

# Open MPI's transport btl/ofi sleeps for a second when it is closed: within MPI_Init on a host without such a network.
# It serves one-sided communication, which fedmpi does not use; messages over libfabric use mtl/ofi. The variable is
# set only under Open MPI 5's mpirun, which has passed on the settings of its parameter files: under other launchers it
# would override them.
EXCLUDE_OFI = "OMPI_MCA_btl", "^ofi"
EXTRA_S_AFTER_RANK_0 = 3  # the other ranks wait this much longer: rank 0 prints the error, and the launcher ends them
DATA, CONTROL = 0, 1  # MPI tags of messages
BUSY_POLL_S = 0.05  # for this time requests are tested without pauses, since MPI moves messages only inside its calls
MAX_PAUSE_S = 1e-3  # the longest pause: 0.1 % of a round of one second, and hardly any processor time
CHECK_INTERVAL_S = 0.5  # interval at which this rank updates the list of missing messages
INTEGER_TYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # bytes of an element -> type that MPI knows

KILL_SCRIPT = """
left=$2
while sleep 1 && kill -0 $1 2>/dev/null; do
    left=$((left - 1))
    [ $left -gt 0 ] || { echo "$3" >&2; kill -9 $1; exit; }
done
"""  # a shell script that prints $3 and kills process $1 after $2 seconds

NEEDS_MPIRUN = (
    "comm.backend: mpi needs mpirun (or srun --mpi=...); if ranks are started by torchrun or with the variables RANK, "
    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set comm.backend: gloo or nccl."
)
LAUNCHER_REMEDIES = {  # launcher -> advice if the launcher does not belong to the MPI library that mpi4py loaded
    "mpi": "Start with the mpirun of that MPI, or make mpi4py load the launcher's MPI: set MPI4PY_LIBMPI to its "
    "libmpi.so, "
    "or, with its mpicc on PATH, `pip install --force-reinstall --no-binary mpi4py mpi4py`; or use srun or torchrun.",
    "slurm": "Select the PMI of that MPI library, e.g. `srun --mpi=pmix` (`srun --mpi=list` lists the available "
    "ones), or "
    "start with mpirun inside the allocation, or set comm.backend: gloo.",
}


# ---- the MPI library ----
def import_mpi(launcher: str = "mpi") -> Any:
    """Import mpi4py.MPI without initialising MPI, and return it.

    Raises:
        UserError: mpi4py or its MPI library is missing, or the launcher does not start MPI processes.
    """
    if launcher in ("torchrun", "env://"):
        raise UserError(NEEDS_MPIRUN)
    if "PRTE_LAUNCHED" in os.environ:
        os.environ.setdefault(*EXCLUDE_OFI)
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # importing MPI must not initialise it
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"mpi4py cannot be loaded ({error}), but comm.backend is mpi, or an MPI launcher has started this "
            "process.\n"
            f"Install it with `pip install 'fedmpi[mpi]'`, or start with torchrun or srun, and set comm.backend: gloo."
        ) from error
    return MPI


def initialize_mpi(job: Job, timeout_s: float) -> Any:
    """Initialise MPI and return COMM_WORLD, the communicator of all ranks of `job`.

    MPI_Init waits for all ranks and cannot be interrupted. If this takes longer than timeout_s seconds, an error is
    printed and this process is killed.

    Raises:
        UserError: the MPI library of the launcher is not the one that mpi4py loaded.
    """
    MPI = import_mpi(job.launcher)
    if not MPI.Is_initialized():
        with kill_after_timeout(job, "MPI_Init, which waits for all ranks", timeout_s):
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
    if MPI.COMM_WORLD.size != job.size:
        library = str(MPI.Get_library_version()).split(",")[0].splitlines()[0]
        raise UserError(
            f"{job.launcher} started {job.size} ranks, but MPI sees {MPI.COMM_WORLD.size}: the MPI that mpi4py loaded "
            f"({library}) was not started by this launcher.\n{LAUNCHER_REMEDIES[job.launcher]}"
        )
    return MPI.COMM_WORLD


def finalize_mpi(job: Job, timeout_s: float) -> None:
    """Finalize MPI, which waits for all ranks; after timeout_s seconds, print an error and kill this process."""
    MPI = import_mpi()
    if not MPI.Is_finalized():
        with kill_after_timeout(job, "MPI_Finalize, which waits for all ranks", timeout_s):
            MPI.Finalize()


@contextmanager
def kill_after_timeout(job: Job, operation: str, timeout_s: float) -> Iterator[None]:
    """Print an error and kill this process if the `with` block takes longer than timeout_s seconds.

    MPI_Init and MPI_Finalize hold the interpreter lock, so a shell process runs the timer instead of a Python thread.

    Args:
        job: this rank, which the error message names.
        operation: a description of the block, for the error message.
        timeout_s: limit in seconds; ranks other than rank 0 wait EXTRA_S_AFTER_RANK_0 seconds longer.
    """
    text = f"fedmpi [rank {job.rank} on {job.host}]: error: still in {operation}, after {timeout_s:.0f} s"
    limit_s = max(1, int(timeout_s)) + (EXTRA_S_AFTER_RANK_0 if job.rank else 0)
    words = [str(os.getpid()), str(limit_s), f"{text}; a rank is dead, hung or was never started"]
    guard = subprocess.Popen(["sh", "-c", KILL_SCRIPT, "sh", *words])
    try:
        yield
    finally:
        guard.terminate()
        guard.wait()


# ---- messages ----
class PendingMessage(NamedTuple):
    """A message that is being sent or received; the reference to its tensor x keeps the memory alive."""

    peer: int
    handle: Any
    x: Tensor


@final
class MpiCommunicator(Communicator):
    """The communicator that uses MPI, for tensors on the CPU."""

    can_regroup = "MPI cannot reconnect the remaining ranks (set comm.backend: gloo)"

    def __init__(self, job: Job, comm: Any, timeouts: Timeouts) -> None:
        Communicator.__init__(self, torch.device("cpu"), comm.rank, comm.size, timeouts.round)
        self.job, self.comm, self.timeouts = job, comm, timeouts
        self.unfinished: list[
            PendingMessage
        ] = []  # retained after a time-out, since MPI may still write into their memory

    def _shutdown(self) -> None:
        finalize_mpi(self.job, self.round_timeout_s)

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> list[PendingMessage]:
        requests = [self._receive(peer, x, DATA) for peer, x in incoming]
        return requests + [self._send(peer, x, DATA) for peer, x in outgoing]

    def _wait_for_posted(self, posted: list[PendingMessage]) -> None:
        if late := self._wait(posted, self.message_timeout_s):
            raise self.make_timeout_error(late)

    def _receive(self, peer: int, x: Tensor, tag: int) -> PendingMessage:
        return PendingMessage(peer, self.comm.Irecv(_view_as_integers(x), peer, tag), x)

    def _send(self, peer: int, x: Tensor, tag: int) -> PendingMessage:
        return PendingMessage(peer, self.comm.Isend(_view_as_integers(x), peer, tag), x)

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        """Gather the payloads at rank 0, which alone decides which ranks are late, and broadcast them from there."""
        frames = torch.zeros(self.size, 4 + ALLGATHER_BYTES, dtype=torch.uint8)  # length, payload
        mine = bytearray(len(payload).to_bytes(4, "little") + payload)
        frames[self.rank, : len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
        silent = torch.zeros(self.size, dtype=torch.uint8)
        others = self.alive[1:]
        if self.rank == 0:
            silent[list(self._wait([self._receive(peer, frames[peer], CONTROL) for peer in others], deadline_s))] = 1
            present = [peer for peer in others if not silent[peer]]
            self._wait([self._send(peer, silent, CONTROL) for peer in present], self.timeouts.reply)
        else:
            posted = [self._send(0, frames[self.rank], CONTROL), self._receive(0, silent, CONTROL)]
            silent[list(self._wait(posted, deadline_s + self.timeouts.reply))] = 1
        if silent.any():
            absent, remedy = silent.nonzero().flatten().tolist(), "" if self.hosts else START_REMEDY
            raise make_missing_ranks_error(absent, self.size, deadline_s, self.hosts, remedy)
        self._broadcast(frames.flatten())
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in map(bytes, frames.numpy())]

    def _wait(self, requests: list[PendingMessage], timeout_s: float) -> set[int]:
        """Wait for all requests; return the peers whose messages are not complete after timeout_s seconds."""
        handles, clock = [request.handle for request in requests], self.timeouts.clock
        began, pause_s, look_s = clock.now(), 0.0, 0.1
        try:
            while not import_mpi().Request.Testall(handles):
                waited_s = clock.now() - began
                if waited_s > min(
                    look_s, timeout_s
                ):  # updated here, since the error reporter's thread may not call MPI
                    self.waiting_for = {request.peer for request in requests if not request.handle.Test()}
                    look_s = waited_s + CHECK_INTERVAL_S
                if waited_s > timeout_s:
                    self.unfinished += requests
                    return set(self.waiting_for)
                clock.sleep(pause_s)
                pause_s = 0.0 if waited_s < BUSY_POLL_S else min(MAX_PAUSE_S, 2 * pause_s + 1e-5)
        except import_mpi().Exception as error:
            self.unfinished += requests
            raise ConnectionLostError(f"MPI has lost a rank ({error})") from error
        self.waiting_for = ()
        return set()


def _view_as_integers(x: Tensor) -> np.ndarray:
    """Return a view of x as an integer array with elements of the same size, since MPI has no bfloat16."""
    return x.detach().view(INTEGER_TYPES[x.element_size()]).numpy()
