"""The store through which the ranks of a job find each other. Rank 0 holds it; where, follows from the launcher.

torchrun   rank 0 tells through the agent's store; without one it is at MASTER_ADDR and MASTER_PORT
env://     rank 0 is at MASTER_ADDR and MASTER_PORT
mpirun     rank 0 takes a free port and tells by an MPI broadcast, with a random key
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

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from fedmpi.comm import network
from fedmpi.comm.base import Lost, within
from fedmpi.comm.launchers import launcher_env, slurm_hosts
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.rendezvous import auth, store_server
from fedmpi.comm.rendezvous.store import RankStore
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import UserError

Address = tuple[str, int]
Server = tuple[Address, subprocess.Popen[bytes]]  # where it listens, its process

LOOPBACK = "127.0.0.1"
TOLD_BYTES = 1024
PATIENCE_S = 1.0, 10.0  # with who answers at one address: at first, at most
RETRY_S = 0.1  # between two attempts to connect
PORTS, FIRST_PORT, SPAN = 16, 10_000, 20_000  # below Linux's ephemeral range (32768..60999), which any program may use

TOKEN = secrets.token_hex(8)  # with its number, distinguishes this process from those of all hosts


def find_store(
    job: Job,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    timeouts: Timeouts | None = None,
    address: str = "",
) -> Store:
    """Find, or at rank 0 start, the job's store.

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
        return under_torchrun(job, env, deadline, timeouts, address)
    if job.launcher == "mpi":
        return under_mpi(job, deadline, timeouts, address)
    by_variables = under_env if job.launcher == "env://" else under_slurm
    return by_variables(job, env, deadline, timeouts)


def new_connection(store: Store) -> Store:
    """One more connection to a store: a call that waits keeps its own for itself."""
    return store.new_connection()  # type: ignore[attr-defined]


def under_torchrun(job: Job, env: Mapping[str, str], deadline: float, timeouts: Timeouts, address: str = "") -> Store:
    host, port = launcher_env.master_address(env)
    attempt = f"attempt {env.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the agent's store keeps what earlier ones said
    key = auth.job_key(f"torchrun {host} {port} {env.get('TORCHELASTIC_RUN_ID', '')} {attempt}", env)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        remedy = "Give torchrun another one, e.g. --master-port 0 or --rdzv-endpoint HOST:PORT."
        return at_master(job, (host, port), key, deadline, timeouts, remedy)
    agent = PrefixStore(attempt, agent_store(host, port, deadline, timeouts))

    def key_of_meeting() -> str:
        """A key in the agent's store for each meeting of these processes, on all ranks alike."""
        return f"fedmpi {agent.add(f'meetings of rank {job.rank}', 1)}"

    if job.rank == 0:
        own, names = offer(job, address, host)
        store = start_store(auth.listen(own, 0), key, deadline, timeouts)
        agent.set(key_of_meeting(), encode_addresses(store, names))
        return store
    silent = "rank 0 is silent: it has not told the address of its store"
    left_s, clock = seconds(deadline, timeouts), timeouts.clock
    try:
        where = decode_addresses(within(left_s, lambda: agent.get(key_of_meeting()).decode(), silent, clock))
        return connect_store(where, key, deadline, timeouts)
    except DistError as error:
        raise Lost(f"{silent} ({line(error)})") from error


def under_env(job: Job, env: Mapping[str, str], deadline: float, timeouts: Timeouts) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT; refuse a second process of the same rank.

    The variables do not name the job, so its key is made of what is the same on all ranks. MASTER_ADDR is not, as
    Kubeflow's PyTorchJob gives "localhost" to rank 0.
    """
    host, port = launcher_env.master_address(env)
    key = auth.job_key(f"env:// {port} {job.size}", env)
    remedy = "Give all ranks another MASTER_PORT."
    store = at_master(job, (host, port), key, deadline, timeouts, remedy)
    mine = f"{TOKEN} {os.getpid()} {job.host}"
    first = store.compare_set(f"process of rank {job.rank}", "", mine).decode()
    if first != mine:
        raise UserError(
            f"RANK={job.rank} is also that of process {first.split()[1]} on host {first.split()[2]}: give each process "
            f"a RANK of its own, 0 to {job.size - 1}, and each job a MASTER_PORT of its own."
        )
    return store


def at_master(job: Job, master: Address, key: bytes, deadline: float, timeouts: Timeouts, remedy: str) -> RankStore:
    """The store at MASTER_ADDR and MASTER_PORT; remedy: what to do if rank 0's port is taken."""
    if job.rank:
        return connect_store([master], key, deadline, timeouts)
    host, port = master
    try:
        listener = auth.listen(own_address(job, host), port)
    except OSError as error:
        raise UserError(f"rank 0 cannot listen on port {port} of {host}: {error.strerror}\n{remedy}") from error
    return start_store(listener, key, deadline, timeouts)


def agent_store(host: str, port: int, deadline: float, timeouts: Timeouts) -> TCPStore:
    patience_s = seconds(deadline, timeouts)
    silent = f"torchrun's agent is silent: no store at {host}:{port} after {patience_s:.0f} s"
    reachable(host, port, deadline, timeouts)  # torch would fill the screen while nobody listens there
    try:
        return within(
            patience_s + timeouts.reply,
            lambda: TCPStore(host, port, timeout=timedelta(seconds=patience_s), wait_for_workers=False),
            f"{silent}; something takes connections there and never answers, such as another service on this port",
            timeouts.clock,
        )
    except DistError as error:
        raise Lost(f"{silent} ({line(error)})") from error


def under_mpi(job: Job, deadline: float, timeouts: Timeouts, address: str = "") -> Store:
    from fedmpi.comm.backends import mpi

    key = secrets.token_bytes(auth.DIGEST)
    own, names = offer(job, address) if job.rank == 0 else ("", [])
    server = start_server(auth.listen(own, 0), key) if job.rank == 0 else None  # it starts while MPI does
    world = mpi.world(job, deadline - timeouts.clock.now())
    words = torch.zeros(TOLD_BYTES, dtype=torch.uint8)  # "key port host host ...", padded with zeros
    if server is not None:
        store = connect_own_store(server, key, deadline, timeouts)
        text = f"{key.hex()} {encode_addresses(store, names)}".encode()
        words[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sent = world.Ibcast(words.numpy(), root=0)
    while not sent.Test():  # Bcast has no time-out
        if timeouts.clock.now() > deadline:
            raise Lost("rank 0 is silent: it has not told the address of its store")
        timeouts.clock.sleep(1e-3)
    if server is not None:
        return store
    said, where = bytes(words.tolist()).rstrip(b"\0").decode().split(" ", 1)
    return connect_store(decode_addresses(where), bytes.fromhex(said), deadline, timeouts)


def under_slurm(job: Job, env: Mapping[str, str], deadline: float, timeouts: Timeouts) -> Store:
    """Slurm tells every rank which host rank 0 is on, but not which port is free there."""
    source = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_NODELIST"
    step = slurm_step(env)
    key = auth.job_key(f"slurm {step}", env)
    if job.rank:
        first = slurm_hosts.expand(env[source])[0]
        host = LOOPBACK if job.local_size == job.size else slurm_hosts.address(first, source, env)
        return connect_store([(host, port) for port in ports(step)], key, deadline, timeouts)
    for port in ports(step):
        try:
            listener = auth.listen(own_address(job, slurm_hosts.expand(env[source])[0]), port)
        except OSError:
            continue
        return start_store(listener, key, deadline, timeouts)
    raise UserError(
        f"{job.host}: none of the ports {ports(step)} is free, so other ranks could not find rank 0.\n"
        f"Start the job again (another job id means other ports) or with torchrun."
    )


def slurm_step(env: Mapping[str, str]) -> str:
    """A text that distinguishes this job step from all others, including its own run before a requeue."""
    return f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"


def ports(step: str) -> list[int]:
    """The ports to try, the same on every rank of a job; what another job has there, has another key."""
    digests = (hashlib.sha256(f"{step}/{i}".encode()).digest() for i in range(PORTS))
    return [FIRST_PORT + int.from_bytes(digest[:4], "little") % SPAN for digest in digests]


# ---- rank 0's side ----
def start_store(listener: socket.socket, key: bytes, deadline: float, timeouts: Timeouts) -> RankStore:
    """The store at rank 0, which does not wait for the other ranks: the first allgather can name the missing ones."""
    return connect_own_store(start_server(listener, key), key, deadline, timeouts)


def start_server(listener: socket.socket, key: bytes) -> Server:
    """Start the process of rank 0's store; it listens in a moment."""
    host, port = listener.getsockname()[:2]
    process = store_server.start(listener, key)
    return (host if host not in ("::", "0.0.0.0") else LOOPBACK, port), process


def connect_own_store(server: Server, key: bytes, deadline: float, timeouts: Timeouts) -> RankStore:
    """Connect rank 0 to its own store, whose process lives as long as this connection is held."""
    address, process = server
    store = connect_store([address], key, deadline, timeouts)
    store.server = process
    return store


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


def encode_addresses(store: RankStore, names: list[str]) -> str:
    """Return "port name name ...", the names that fit into an MPI broadcast beside the key."""
    text = f"{store.address[1]} {' '.join(names)}"
    room = TOLD_BYTES - 2 * auth.DIGEST - 1
    return text if len(text) <= room else text[:room].rpartition(" ")[0]


# ---- the others' side ----
def decode_addresses(text: str) -> list[Address]:
    port, *names = text.split()
    return [(name, int(port)) for name in names]


def connect_store(where: list[Address], key: bytes, deadline: float, timeouts: Timeouts) -> RankStore:
    """Connect to rank 0's store, which is at one of these addresses, or will be. Raises Lost past the deadline."""
    patience_s, most_s = PATIENCE_S
    strange = False
    while True:
        for address in where:
            try:
                connection = auth.connect_authenticated(address, key, min(patience_s, seconds(deadline, timeouts)))
                return RankStore(address, key, connection, timeouts)
            except auth.AuthenticationError:
                strange = True
            except (OSError, UnicodeError):  # no service there, or another one; or no name that could be looked up
                continue
        if timeouts.clock.now() > deadline:
            break
        timeouts.clock.sleep(RETRY_S)
        patience_s = min(2 * patience_s, most_s)
    why = "is rank 0 there, does the name resolve here, and does a firewall stand between the hosts?"
    if strange:
        why = (
            "what answers there is of another job, or has another secret: all ranks need the same file "
            "~/.fedmpi/secret, or the same FEDMPI_SECRET in their environment"
        )
    raise Lost(f"rank 0 is silent: no store of this job answers at {format_addresses(where)}; {why}")


def format_addresses(where: Iterable[Address]) -> str:
    """host:port or host:port; of one host with many ports, each host once."""
    hosts: dict[str, list[int]] = {}
    for host, port in where:
        hosts.setdefault(host, []).append(port)
    return " or ".join(f"{host}:{','.join(map(str, found))}" for host, found in hosts.items())


def reachable(host: str, port: int, deadline: float, timeouts: Timeouts) -> None:
    """Wait until something listens there."""
    while timeouts.clock.now() < deadline:
        try:
            return socket.create_connection((host, port), timeout=timeouts.reply).close()
        except (OSError, UnicodeError):
            timeouts.clock.sleep(RETRY_S)
    raise Lost(f"torchrun's agent is silent: nothing answers at {host}:{port}; does the name resolve here?")


def seconds(deadline: float, timeouts: Timeouts) -> float:
    return max(1.0, deadline - timeouts.clock.now())


def line(error: Exception) -> str:
    """The first line of an error of torch, which may append a stack of its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
