"""The store through which the ranks of a job find each other. Rank 0 holds it; where, follows from the launcher.

torchrun   rank 0 writes the address into the agent's store; without one it is at MASTER_ADDR and MASTER_PORT
env://     rank 0 is at MASTER_ADDR and MASTER_PORT
mpirun     rank 0 takes a free port and sends the address in an MPI broadcast, with a random key
srun       rank 0 is on the first host of the step, on the first free one of a few ports that all ranks can derive
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from fedmpi.comm import network
from fedmpi.comm.base import Lost, call_with_timeout
from fedmpi.comm.launchers import launcher_env, slurm_hosts
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.rendezvous import auth, store_server
from fedmpi.comm.rendezvous.store import RankStore
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import UserError

Address = tuple[str, int]

LOOPBACK = "127.0.0.1"
BROADCAST_BYTES = 1024  # of the MPI broadcast: key, port, names
PATIENCE_S = 1.0, 10.0  # for an answer at one address: at first, at most
RETRY_S = 0.1  # between two attempts to connect
PORTS, FIRST_PORT, SPAN = 16, 10_000, 20_000  # below Linux's ephemeral range (32768..60999), which any program may use
NO_ADDRESS = "rank 0 is silent: it has not told the address of its store"

TOKEN = secrets.token_hex(8)  # with its number, distinguishes this process from those of all hosts


class StoreLocation(NamedTuple):
    """Where a rank reaches the store: one of these addresses; at rank 0 with the process that serves it."""

    addresses: list[Address]
    key: bytes
    server: subprocess.Popen[bytes] | None = None


def find_store(
    job: Job,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    timeouts: Timeouts | None = None,
    address: str = "",
) -> RankStore:
    """Find, or at rank 0 start, the job's store.

    Rank 0 does not wait for the other ranks: the first allgather can name the missing ones.

    Args:
        job: who this rank is.
        timeout_s: seconds until rank 0 must have answered.
        env: environment variables (default: those of this process).
        timeouts: limits of the single steps, and the clock.
        address: the address of comm.interface. Rank 0 listens there if it can tell the others so, which it can under
            torchrun and mpirun.

    Raises Lost if rank 0 cannot be reached in time, UserError for mistakes that the user can correct.
    """
    env = os.environ if env is None else env
    timeouts = timeouts or Timeouts()
    deadline = timeouts.clock.now() + timeout_s
    if job.launcher == "torchrun":
        location = under_torchrun(job, env, deadline, timeouts, address)
    elif job.launcher == "mpi":
        location = under_mpi(job, deadline, timeouts, address)
    else:
        location = under_env(job, env) if job.launcher == "env://" else under_slurm(job, env)
    store = connect_store(location.addresses, location.key, deadline, timeouts)
    store.server = location.server
    if job.launcher == "env://":
        refuse_second_process(job, store)
    return store


def under_torchrun(
    job: Job, env: Mapping[str, str], deadline: float, timeouts: Timeouts, address: str
) -> StoreLocation:
    host, port = launcher_env.master_address(env)
    attempt = f"attempt {env.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the agent's store keeps keys of earlier ones
    key = auth.job_key(f"torchrun {host} {port} {env.get('TORCHELASTIC_RUN_ID', '')} {attempt}", env)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        remedy = "Give torchrun another one, e.g. --master-port 0 or --rdzv-endpoint HOST:PORT."
        return at_master(job, (host, port), key, remedy)
    agent = PrefixStore(attempt, agent_store(host, port, deadline, timeouts))

    def rendezvous_key() -> str:
        """A key in the agent's store for each rendezvous of these processes, on all ranks alike."""
        return f"fedmpi {agent.add(f'meetings of rank {job.rank}', 1)}"

    if job.rank == 0:
        own, names = offer(job, address, host)
        location = start_store(auth.listen(own, 0), key)
        agent.set(rendezvous_key(), encode_addresses(location, names))
        return location
    left_s = seconds(deadline, timeouts)
    try:
        text = call_with_timeout(left_s, lambda: agent.get(rendezvous_key()).decode(), NO_ADDRESS, timeouts.clock)
        return StoreLocation(decode_addresses(text), key)
    except DistError as error:
        raise Lost(f"{NO_ADDRESS} ({line(error)})") from error


def agent_store(host: str, port: int, deadline: float, timeouts: Timeouts) -> TCPStore:
    """Connect to the store of torchrun's agent."""
    while True:  # torch would fill the screen while nobody listens there
        try:
            socket.create_connection((host, port), timeout=timeouts.reply).close()
            break
        except (OSError, UnicodeError) as error:
            if timeouts.clock.now() > deadline:
                text = f"torchrun's agent is silent: nothing answers at {host}:{port}; does the name resolve here?"
                raise Lost(text) from error
            timeouts.clock.sleep(RETRY_S)
    patience_s = seconds(deadline, timeouts)
    silent = f"torchrun's agent is silent: no store at {host}:{port} after {patience_s:.0f} s"
    try:
        return call_with_timeout(
            patience_s + timeouts.reply,
            lambda: TCPStore(host, port, timeout=timedelta(seconds=patience_s), wait_for_workers=False),
            f"{silent}; something takes connections there and never answers, such as another service on this port",
            timeouts.clock,
        )
    except DistError as error:
        raise Lost(f"{silent} ({line(error)})") from error


def under_env(job: Job, env: Mapping[str, str]) -> StoreLocation:
    """The variables do not name the job, so its key is made of what is the same on all ranks. MASTER_ADDR is not, as
    Kubeflow's PyTorchJob gives "localhost" to rank 0."""
    host, port = launcher_env.master_address(env)
    key = auth.job_key(f"env:// {port} {job.size}", env)
    return at_master(job, (host, port), key, "Give all ranks another MASTER_PORT.")


def refuse_second_process(job: Job, store: Store) -> None:
    """Raise UserError if another process has this rank's number."""
    mine = f"{TOKEN} {os.getpid()} {job.host}"
    first = store.compare_set(f"process of rank {job.rank}", "", mine).decode()
    if first != mine:
        raise UserError(
            f"RANK={job.rank} is also that of process {first.split()[1]} on host {first.split()[2]}: give each process "
            f"a RANK of its own, 0 to {job.size - 1}, and each job a MASTER_PORT of its own."
        )


def at_master(job: Job, master: Address, key: bytes, remedy: str) -> StoreLocation:
    """The store at MASTER_ADDR and MASTER_PORT; remedy: what to do if rank 0's port is taken."""
    if job.rank:
        return StoreLocation([master], key)
    host, port = master
    try:
        listener = auth.listen(own_address(job, host), port)
    except OSError as error:
        raise UserError(f"rank 0 cannot listen on port {port} of {host}: {error.strerror}\n{remedy}") from error
    return start_store(listener, key)


def under_mpi(job: Job, deadline: float, timeouts: Timeouts, address: str) -> StoreLocation:
    from fedmpi.comm.backends import mpi

    location, text = StoreLocation([], secrets.token_bytes(auth.DIGEST)), ""
    if job.rank == 0:  # the process starts while MPI does
        own, names = offer(job, address)
        location = start_store(auth.listen(own, 0), location.key)
        text = f"{location.key.hex()} {encode_addresses(location, names)}"
    world = mpi.world(job, deadline - timeouts.clock.now())
    message = torch.tensor(list(text.encode().ljust(BROADCAST_BYTES, b"\0")), dtype=torch.uint8)
    sent = world.Ibcast(message.numpy(), root=0)
    while not sent.Test():  # Bcast has no time-out
        if timeouts.clock.now() > deadline:
            raise Lost(NO_ADDRESS)
        timeouts.clock.sleep(1e-3)
    if job.rank == 0:
        return location
    key, where = bytes(message.tolist()).rstrip(b"\0").decode().split(" ", 1)
    return StoreLocation(decode_addresses(where), bytes.fromhex(key))


def under_slurm(job: Job, env: Mapping[str, str]) -> StoreLocation:
    """Slurm tells every rank which host rank 0 is on, but not which port is free there."""
    source = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_NODELIST"
    step, first = slurm_step(env), slurm_hosts.expand(env[source])[0]
    key = auth.job_key(f"slurm {step}", env)
    if job.rank:
        host = LOOPBACK if job.local_size == job.size else slurm_hosts.address(first, source, env)
        return StoreLocation([(host, port) for port in ports(step)], key)
    for port in ports(step):
        try:
            return start_store(auth.listen(own_address(job, first), port), key)
        except OSError:
            continue
    raise UserError(
        f"{job.host}: none of the ports {ports(step)} is free, so other ranks could not find rank 0.\n"
        f"Start the job again (another job id means other ports) or with torchrun."
    )


def slurm_step(env: Mapping[str, str]) -> str:
    """A text that distinguishes this job step from all others, including its own run before a requeue."""
    return f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"


def ports(step: str) -> list[int]:
    """The ports to try, the same on every rank of a job; a store of another job there has another key."""
    digests = (hashlib.sha256(f"{step}/{i}".encode()).digest() for i in range(PORTS))
    return [FIRST_PORT + int.from_bytes(digest[:4], "little") % SPAN for digest in digests]


# ---- rank 0's side ----
def start_store(listener: socket.socket, key: bytes) -> StoreLocation:
    """Start the process of rank 0's store, which lives as long as its pipe to this process; it listens in a moment."""
    host, port = listener.getsockname()[:2]
    process = store_server.start(listener, key)
    return StoreLocation([(host if host not in ("::", "0.0.0.0") else LOOPBACK, port)], key, process)


def own_address(job: Job, name: str) -> str:
    """Return where rank 0 listens if the others come by `name`: loopback if all ranks are on this host, else the name's
    address; "" (everywhere) if the name leads to no address that other hosts know."""
    if job.local_size == job.size:
        return LOOPBACK
    address = network.resolve(name)
    return "" if network.is_loopback(address) else address


def offer(job: Job, address: str, launcher: str = "") -> tuple[str, list[str]]:
    """Return where rank 0 listens, and the names at which the other ranks try to reach it, the best first.

    Args:
        job: rank 0's.
        address: that of comm.interface, "" without one.
        launcher: host name or address at which all ranks have reached the launcher, MASTER_ADDR; "" if unknown.

    Returns:
        The one address where the others come; "" (everywhere) and several names where that is not certain, as the host
        name does not resolve, or resolves to 127.0.1.1 or to an address that this host does not have.
    """
    if job.local_size == job.size:
        return LOOPBACK, [LOOPBACK]
    if address:
        return address, [address]
    known = network.resolve(launcher or job.host)
    if not network.is_loopback(known) and network.is_own(known):
        return known, [known] if launcher else [known, job.host]
    names = [network.address_towards(launcher), launcher, *network.outward_addresses(), job.host]
    return "", list(dict.fromkeys(name for name in names if not network.is_loopback(name)))


def encode_addresses(location: StoreLocation, names: list[str]) -> str:
    """Return "port name name ...", the names that fit into an MPI broadcast beside the key."""
    text = f"{location.addresses[0][1]} {' '.join(names)}"
    limit = BROADCAST_BYTES - 2 * auth.DIGEST - 1
    return text if len(text) <= limit else text[:limit].rpartition(" ")[0]


# ---- the others' side ----
def decode_addresses(text: str) -> list[Address]:
    port, *names = text.split()
    return [(name, int(port)) for name in names]


def connect_store(where: list[Address], key: bytes, deadline: float, timeouts: Timeouts) -> RankStore:
    """Connect to rank 0's store, which is at one of these addresses, or will be. Raises Lost past the deadline."""
    patience_s, most_s = PATIENCE_S
    why = "is rank 0 there, does the name resolve here, and does a firewall stand between the hosts?"
    while True:
        for address in where:
            try:
                connection = auth.connect_authenticated(address, key, min(patience_s, seconds(deadline, timeouts)))
                return RankStore(address, key, connection, timeouts)
            except auth.AuthenticationError:
                why = (
                    "what answers there is of another job, or has another secret: all ranks need the same file "
                    "~/.fedmpi/secret, or the same FEDMPI_SECRET in their environment"
                )
            except (OSError, UnicodeError):  # no service there, or another one; or no name that could be looked up
                continue
        if timeouts.clock.now() > deadline:
            raise Lost(f"rank 0 is silent: no store of this job answers at {format_addresses(where)}; {why}")
        timeouts.clock.sleep(RETRY_S)
        patience_s = min(2 * patience_s, most_s)


def format_addresses(where: Iterable[Address]) -> str:
    """host:port or host:port; of one host with many ports, each host once."""
    hosts: dict[str, list[int]] = {}
    for host, port in where:
        hosts.setdefault(host, []).append(port)
    return " or ".join(f"{host}:{','.join(map(str, found))}" for host, found in hosts.items())


def seconds(deadline: float, timeouts: Timeouts) -> float:
    return max(1.0, deadline - timeouts.clock.now())


def line(error: Exception) -> str:
    """The first line of an error of torch, which may append a stack of its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
