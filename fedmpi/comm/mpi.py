"""MPI through mpi4py: buffers only (the calls with a capital letter), never pickles.

Nothing here blocks inside MPI: most libraries spin while they wait and would take the core from a rank that trains.
Requests are posted, then tested with pauses in between, until a deadline.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm.base import ALLGATHER_BYTES, Communicator, Gone, Lost, Message, relay
from fedmpi.comm.job import Job
from fedmpi.comm.leaving import leave
from fedmpi.common import parent
from fedmpi.common.errors import UserError

DATA, CONTROL = 0, 1  # tags
EAGER_S = 0.05  # requests are first tested without pauses for so long: MPI moves messages only inside its calls
PAUSE_S = 1e-3  # the longest pause: 0.1 % of a round of one second, and hardly any processor time
ABORT_S = 3.0  # allowed for MPI_Abort
RANK_0_FIRST_S = 3  # in which the launcher ends the others, so that one rank says what all have found
GRACE_S = 5.0  # allowed after the deadline of allgather_bytes for rank 0's verdict to reach the others
SILENT = 2**32 - 1  # in place of a payload's length
CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> type that MPI knows


GUARD = """
left=$3
while sleep 1 && kill -0 $1 2>/dev/null; do
    left=$((left - 1)) said= parent=$2
    [ $left -gt 0 ] || said=$4
    { read -r line < /proc/$1/stat && line=${line##*) } && line=${line#* } && parent=${line%% *}; } 2>/dev/null
    [ $parent = $2 ] || said=$5
    [ -z "$said" ] || { echo "$said" >&2; kill -9 $1; exit; }
done
"""  # of process $1, whose parent is $2, for $3 seconds


REMEDY = {  # launcher -> advice if it does not belong to the MPI that mpi4py loaded
    "mpi": "Start with the mpirun of that MPI; or make mpi4py load the launcher's: set MPI4PY_LIBMPI to its libmpi.so, "
    "or, with its mpicc on PATH, `pip install --force-reinstall --no-binary mpi4py mpi4py`; or use srun or torchrun.",
    "slurm": "Name the PMI that it speaks, e.g. `srun --mpi=pmix` (`srun --mpi=list` shows which there are), or start "
    "with mpirun inside the allocation, or use comm.backend=gloo.",
    "torchrun": "comm.backend=mpi needs mpirun (or srun --mpi=...); torchrun goes with comm.backend=gloo or nccl.",
}


def connect(job: Job, start_timeout_s: float, round_timeout_s: float) -> Communicator:
    return Mpi(job, world(job, start_timeout_s), round_timeout_s)


def load() -> Any:
    """mpi4py.MPI, not initialised. Raises UserError where mpi4py or its MPI library is missing."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # importing MPI must not initialise it
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"started by an MPI launcher, or asked for comm.backend=mpi, but mpi4py does not load: {error}\n"
            f"Install it with `pip install 'fedmpi[mpi]'`, or start with torchrun or srun and comm.backend=gloo."
        ) from error
    return MPI


def world(job: Job, timeout_s: float) -> Any:
    """COMM_WORLD of `job`, initialised.

    Raises UserError if the launcher's MPI is not the one that mpi4py loaded. MPI_Init waits for all ranks and cannot
    be interrupted: past the time-out this process says so and exits.
    """
    MPI = load()
    if not MPI.Is_initialized():
        with bounded(job, "MPI_Init, which waits for all ranks", timeout_s):
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
    if MPI.COMM_WORLD.size != job.size:
        raise UserError(
            f"{job.launcher} started {job.size} ranks, but MPI sees {MPI.COMM_WORLD.size}: the MPI that mpi4py loaded "
            f"({library()}) was not started by this launcher.\n{REMEDY[job.launcher]}"
        )
    return MPI.COMM_WORLD


def library() -> str:
    return str(load().Get_library_version()).split(",")[0].splitlines()[0]


def identity() -> Job:
    """The job of this process, according to MPI itself."""
    MPI = load()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    return Job("mpi", MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, here.rank, here.size, MPI.Get_processor_name())


def finalize(job: Job, timeout_s: float) -> None:
    MPI = load()
    if not MPI.Is_finalized():
        with bounded(job, "MPI_Finalize, which waits for all ranks", timeout_s):
            MPI.Finalize()


@contextmanager
def bounded(job: Job, where: str, timeout_s: float) -> Iterator[None]:
    """End the process, with a word, if the block takes longer, or if the launcher dies meanwhile.

    Such a call holds the interpreter: no thread of Python runs beside it, and a shell has to look after it.
    """
    who = f"fedmpi [rank {job.rank} on {job.host}]: error: still in {where}"
    words = (f"{who}, after {timeout_s:.0f} s; a rank is dead, hung or was never started", f"{who}; the launcher died")
    pids = (str(os.getpid()), str(parent.PID))
    limit_s = max(1, int(timeout_s)) + (RANK_0_FIRST_S if job.rank else 0)
    guard = subprocess.Popen(["sh", "-c", GUARD, "sh", *pids, str(limit_s), *words])
    try:
        yield
    finally:
        guard.terminate()
        guard.wait()


def abort(code: int) -> NoReturn:
    """End this process, and all others of the job where MPI works; at once where it does not."""
    MPI = load()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)  # if Abort waits for a dead launcher
            MPI.COMM_WORLD.Abort(code)
    leave(code)


def buffer(x: Tensor) -> np.ndarray:
    """x's own memory as an array of a type that MPI has: bfloat16 travels as 16-bit integers, bit for bit."""
    return x.detach().view(CARRIER[x.element_size()]).numpy()


@final
class Mpi(Communicator):
    def __init__(self, job: Job, comm: Any, round_timeout_s: float) -> None:
        Communicator.__init__(self, comm.rank, comm.size, torch.device("cpu"), round_timeout_s)
        self.job = job
        self.comm = comm
        self.round_timeout_s = round_timeout_s

    def _meet(self) -> None:
        self.allgather_bytes(b"", self.round_timeout_s)

    def _part(self) -> None:
        finalize(self.job, self.round_timeout_s)

    def _broadcast(self, x: Tensor) -> None:
        relay(x, self.rank, self.alive, self._exchange)

    def _exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        requests = [(peer, self.comm.Irecv(buffer(x), peer, DATA)) for peer, x in incoming]
        requests += [(peer, self.comm.Isend(buffer(x), peer, DATA)) for peer, x in outgoing]
        late = self._wait(requests, self.round_timeout_s)
        if late:
            raise Lost(
                f"{ranks(late)} {'is' if len(late) == 1 else 'are'} silent: no message from or to "
                f"{'it' if len(late) == 1 else 'them'} for {self.round_timeout_s:g} s (comm.round_timeout_s)"
            )

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        """Rank 0 gathers the payloads and alone decides which ranks are silent, so that all ranks act alike."""
        frames = torch.zeros(self.size, 4 + ALLGATHER_BYTES, dtype=torch.uint8)  # length, payload
        mine = bytearray(len(payload).to_bytes(4, "little") + payload)
        frames[self.rank, : len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
        silent = torch.zeros(self.size, dtype=torch.uint8)
        others = range(1, self.size)
        if self.rank == 0:
            posted = [(peer, self.comm.Irecv(buffer(frames[peer]), peer, CONTROL)) for peer in others]
            silent[list(self._wait(posted, deadline_s))] = 1
            told = [(peer, self.comm.Isend(buffer(silent), peer, CONTROL)) for peer in others if not silent[peer]]
            self._wait(told, GRACE_S)
        else:
            posted = [(0, self.comm.Isend(buffer(frames[self.rank]), 0, CONTROL))]
            posted += [(0, self.comm.Irecv(buffer(silent), 0, CONTROL))]
            silent[list(self._wait(posted, deadline_s + GRACE_S))] = 1
        if silent.any():
            raise Lost(f"silent for {deadline_s:.0f} s: {ranks(silent.nonzero().flatten().tolist())} of {self.size}")
        relay(frames.flatten(), self.rank, self.alive, self._exchange)
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in map(bytes, frames.numpy())]

    def _wait(self, requests: list[tuple[int, Any]], timeout_s: float) -> set[int]:
        """Wait for all requests and return the peers of those that are not done in time."""
        handles = [request for _, request in requests]
        began = time.monotonic()
        pause_s = 0.0
        while not self._all_done(handles):
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                return {peer for peer, request in requests if not request.Test()}
            time.sleep(pause_s)
            pause_s = 0.0 if waited_s < EAGER_S else min(PAUSE_S, 2 * pause_s + 1e-5)
        return set()

    def _all_done(self, handles: list[Any]) -> bool:
        try:
            return bool(load().Request.Testall(handles))
        except load().Exception as error:
            raise Gone(f"MPI has lost a rank ({error})") from error


def ranks(those: Iterable[int]) -> str:
    names = sorted(those)
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(map(str, names))
