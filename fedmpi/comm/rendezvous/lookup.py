"""Find the key-value store through which the ranks of a job connect; rank 0 starts it.

The address of the store depends on the launcher:

torchrun   MASTER_ADDR, which is rank 0's host, and the first free port of a list derived from the job's identifier
srun       the first host of the job step, and the first free port of such a list
env://     MASTER_ADDR and MASTER_PORT
mpirun     rank 0 chooses a free port, and sends its addresses and a random key in an MPI broadcast
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import subprocess
from collections.abc import Mapping

import torch

from fedmpi.comm import launchers, network
from fedmpi.comm.base import RankLostError
from fedmpi.comm.launchers import Job
from fedmpi.comm.rendezvous import auth, store_server
from fedmpi.comm.rendezvous.store import RankStore
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten

LOOPBACK = "127.0.0.1"
BROADCAST_BYTES, MAX_HOST_NAMES = (
    1024,
    8,
)  # size of the MPI broadcast of key, port and host names; maximum number of names
CONNECT_TIMEOUTS_S = 1.0, 10.0  # time-out for one address: initial and longest
RETRY_S = 0.1  # pause between two attempts to connect
NUM_PORTS, FIRST_PORT, PORT_RANGE = (
    16,
    10_000,
    20_000,
)  # below Linux's ephemeral range (32768..60999), which any program may use

Addresses = list[tuple[str, int]]  # (host, port) pairs at which the store may be
Server = subprocess.Popen[bytes]  # the process of the store, which rank 0 starts


def connect_to_store(
    job: Job,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    timeouts: Timeouts | None = None,
    interface: str = "",
) -> RankStore:
    """Connect to the job's store, which rank 0 starts first.

    Rank 0 does not wait for the other ranks here; the first allgather waits for them, and names missing ranks.

    Args:
        job: this process's rank, and the number of ranks.
        timeout_s: time limit in seconds for rank 0 to answer.
        env: environment variables (default: the variables of this process).
        timeouts: limits of the individual steps, and the clock.
        interface: the address of the network interface that comm.interface selects; under mpirun, rank 0 listens on it.

    Raises:
        RankLostError: rank 0 cannot be reached in time.
        UserError: the launcher's variables or the secret contain a mistake, or no port is free.
    """
    timeouts, env = timeouts or Timeouts(), os.environ if env is None else env
    deadline = timeouts.clock.now() + timeout_s
    if job.launcher == "mpi":
        addresses, key, server = start_store_and_share_by_mpi(job, deadline, timeouts, interface)
    else:
        addresses, key, server = locate_or_start_store_by_env(job, env)
    store = retry_connecting(addresses, key, deadline, timeouts)
    store.server = server
    return store


def locate_or_start_store_by_env(job: Job, env: Mapping[str, str]) -> tuple[Addresses, bytes, Server | None]:
    """Derive the store's addresses and key from the launcher's variables; rank 0 also starts the store.

    Returns:
        The addresses to try, the job's key, and the process of the store (None on ranks other than 0).
    """
    if job.launcher == "slurm":
        name = identify_slurm_step(env)
        host, choices = (
            launchers.get_first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"]),
            derive_ports(name),
        )
    else:
        host, port = launchers.read_master_address(env)
        # The name must not contain MASTER_ADDR, which may differ between ranks: Kubeflow's PyTorchJob sets "localhost"
        # on rank 0.
        name, choices = f"env:// {port} {job.size}", [port]
        if job.launcher == "torchrun":
            name = f"{port} {env.get('TORCHELASTIC_RUN_ID', '')} {env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            choices = derive_ports(name)
    key, on_one_host = auth.derive_job_key(f"{job.launcher} {name}", env), job.local_size == job.size
    if job.rank:
        reach = (
            LOOPBACK if on_one_host else launchers.resolve_slurm_node(host, env) if job.launcher == "slurm" else host
        )
        return [(reach, port) for port in choices], key, None
    own = LOOPBACK if on_one_host else choose_listen_address(host)
    for port in choices:
        with contextlib.suppress(OSError):
            listener = auth.open_listener(own, port)
            return [(own or LOOPBACK, port)], key, store_server.start_store_process(listener, key)
    raise UserError(
        f"rank 0 cannot listen on port {' or '.join(map(str, choices))} of {job.host}, so other "
        "ranks cannot find it.\nStart the job again, or set another MASTER_PORT for all ranks"
    )


def identify_slurm_step(env: Mapping[str, str]) -> str:
    """Return a string that identifies this Slurm job step; it changes when the job is requeued."""
    return f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"


def derive_ports(name: str) -> list[int]:
    """Derive the ports to try from the name of a job, so that all its ranks try the same ones."""
    digests = (hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(NUM_PORTS))
    return [FIRST_PORT + int.from_bytes(digest[:4], "little") % PORT_RANGE for digest in digests]


def choose_listen_address(name: str) -> str:
    """Return the address on which rank 0 listens, so that other hosts can reach it by its host name `name`.

    This is the address to which the name resolves. If that is a loopback address or not an address of this host, the
    result is "", which means all addresses.
    """
    address = network.resolve_host(name)
    return "" if network.is_loopback(address) or not network.is_local_address(address) else address


def start_store_and_share_by_mpi(
    job: Job, deadline: float, timeouts: Timeouts, interface: str
) -> tuple[Addresses, bytes, Server | None]:
    """Start the store on rank 0, and broadcast its addresses and a random key over MPI.

    Returns:
        The addresses to try, the job's key, and the process of the store (None on ranks other than 0).
    """
    from fedmpi.comm.backends import mpi

    server, text = None, ""
    if job.rank == 0:  # before MPI is initialised, so that both start at the same time
        own = LOOPBACK if job.local_size == job.size else interface or choose_listen_address(job.host)
        listener, key = auth.open_listener(own, 0), secrets.token_bytes(auth.DIGEST_BYTES)
        names = [own] if own else [LOOPBACK, *network.list_external_addresses(), job.host][:MAX_HOST_NAMES]
        text = f"{key.hex()} {listener.getsockname()[1]} {' '.join(names)}"
        server = store_server.start_store_process(listener, key)
    world = mpi.initialize_mpi(job, deadline - timeouts.clock.now())
    message = torch.tensor(list(text.encode().ljust(BROADCAST_BYTES, b"\0")), dtype=torch.uint8)
    request = world.Ibcast(message.numpy(), root=0)
    while not request.Test():  # polled, since Bcast has no time-out
        if timeouts.clock.now() > deadline:
            raise RankLostError("rank 0 is silent: it has not sent the address of its store")
        timeouts.clock.sleep(1e-3)
    hexadecimal, port, *names = bytes(message.tolist()).rstrip(b"\0").decode().split()
    return [(name, int(port)) for name in names], bytes.fromhex(hexadecimal), server


def retry_connecting(addresses: Addresses, key: bytes, deadline: float, timeouts: Timeouts) -> RankStore:
    """Try to connect to rank 0's store at each of `addresses` in turn, until it answers or the deadline passes.

    Args:
        addresses: the possible addresses of the store.
        key: the key that authenticates the ranks of this job.
        deadline: the latest time, as measured by timeouts.clock.
        timeouts: the time limits of the store.

    Raises:
        RankLostError: no store of this job has answered by the deadline.
    """
    timeout_s, max_timeout_s = CONNECT_TIMEOUTS_S
    advice = (
        "check that rank 0 is running, that its host name resolves here, and that no firewall blocks the connection"
    )
    clock = timeouts.clock
    while True:
        for address in addresses:
            try:
                connection = auth.connect_authenticated(address, key, min(timeout_s, max(1.0, deadline - clock.now())))
                return RankStore(address, key, connection, timeouts)
            except auth.AuthenticationError:
                advice = (
                    "the store that answers there belongs to another job, or uses another secret; all ranks need the "
                    "same file ~/.fedmpi/secret, or the same FEDMPI_SECRET in their environment"
                )
            except (OSError, UnicodeError):  # no service or another service answers, or the name does not resolve
                continue
        if clock.now() > deadline:
            shown = shorten(" or ".join(f"{host}:{port}" for host, port in addresses))
            raise RankLostError(f"rank 0 is silent: no store of this job answers at {shown}; {advice}")
        clock.sleep(RETRY_S)
        timeout_s = min(2 * timeout_s, max_timeout_s)
