"""The TCPStore through which the ranks of a job find each other; its address follows from the launcher.

torchrun   MASTER_ADDR and MASTER_PORT; the agent holds the store, or rank 0 does
mpirun     rank 0 takes a free port and announces it by an MPI broadcast
srun       rank 0 is on the first host of the step; slurm_port.py finds the port
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from fedmpi.comm import slurm_hosts, slurm_port
from fedmpi.comm.base import Lost, within
from fedmpi.comm.job import Job
from fedmpi.common.errors import UserError

ADDRESS_BYTES = 1024
ANOTHER_S = 5.0  # allowed for one more connection to a store that has answered before
SLACK_S = 5.0  # after which a store that keeps no time-out of its own is given up


def find_store(job: Job, timeout_s: float, env: Mapping[str, str] | None = None) -> tuple[Store, Callable[[], None]]:
    """The job's store, and a function to call once all ranks have it.

    Raises Lost if rank 0 cannot be reached in time, UserError for mistakes that the user can correct.
    """
    env = os.environ if env is None else env
    deadline = time.monotonic() + timeout_s
    if job.launcher == "torchrun":
        return under_torchrun(job, env, deadline), nothing
    if job.launcher == "mpi":
        return under_mpi(job, deadline), nothing
    return under_slurm(job, env, deadline)


def nothing() -> None:
    pass


def under_torchrun(job: Job, env: Mapping[str, str], deadline: float) -> Store:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UserError(
                f"environment variable {name} is not set, though RANK and WORLD_SIZE are: start with torchrun."
            )
    agent_holds_it = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = open_store(host, port, job.rank == 0 and not agent_holds_it, deadline)
    return PrefixStore(attempt(env), store)


def attempt(env: Mapping[str, str]) -> str:
    """After a restart the agent's store still holds the keys of the attempt before, so each one has its own prefix."""
    return f"attempt {env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def another(store: Store) -> Store:
    """One more connection to a store: a call that waits keeps its own for itself."""
    held = store.underlying_store if isinstance(store, PrefixStore) else store
    assert isinstance(held, TCPStore)
    more = open_store(held.host, held.port, False, time.monotonic() + ANOTHER_S)
    return PrefixStore(attempt(os.environ), more) if held is not store else more


def under_mpi(job: Job, deadline: float) -> Store:
    from fedmpi.comm import mpi

    world = mpi.world(job, deadline - time.monotonic())
    address = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8)  # "port host host ...", padded with zeros
    if job.rank == 0:
        store = open_store("127.0.0.1", 0, True, deadline)
        text = " ".join([str(store.port), *my_names(job)]).encode()[:ADDRESS_BYTES]
        address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    told = world.Ibcast(address.numpy(), root=0)
    while not told.Test():  # Bcast has no time-out
        if time.monotonic() > deadline:
            raise Lost("rank 0 is silent: it has not told the address of its store")
        time.sleep(1e-3)
    if job.rank == 0:
        return store
    port, *names = bytes(address.tolist()).rstrip(b"\0").decode().split()
    return open_store(first_reachable(names, int(port), deadline), int(port), False, deadline)


def under_slurm(job: Job, env: Mapping[str, str], deadline: float) -> tuple[Store, Callable[[], None]]:
    word = slurm_port.magic(env)
    if job.rank == 0:
        store = open_store("127.0.0.1", 0, True, deadline)
        return store, slurm_port.serve(word, store.port)
    source = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_NODELIST"
    nodes = slurm_hosts.expand(env[source])
    host = "127.0.0.1" if len(nodes) == 1 else slurm_hosts.resolve(nodes[0], source)
    return open_store(host, slurm_port.ask(host, word, deadline), False, deadline), nothing


def open_store(host: str, port: int, master: bool, deadline: float) -> TCPStore:
    """The store at host:port; `master`: this process holds it.

    Rank 0 does not wait for the other ranks here, since TCPStore could not name the missing ones; the first allgather
    can.
    """
    seconds = max(1.0, deadline - time.monotonic())
    silent = f"rank 0 is silent: no store at {host}:{port} after {seconds:.0f} s"
    patience = timedelta(seconds=seconds)
    if not master:  # torch would fill the screen while nobody listens there
        first_reachable([host], port, deadline)
    try:
        return within(
            seconds + SLACK_S,
            lambda: TCPStore(host, port, is_master=master, timeout=patience, wait_for_workers=False),
            f"{silent}; something takes connections there and never answers, such as another service on this port",
        )
    except DistError as error:
        if master:
            raise UserError(
                f"rank 0 cannot listen on port {port} of {host}: {error}\n"
                f"Give torchrun another one, e.g. --master-port 0 or --rdzv-endpoint HOST:PORT."
            ) from error
        raise Lost(f"{silent} ({line(error)})") from error


def line(error: Exception) -> str:
    """The first line of an error of torch, which may append a stack of its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def my_names(job: Job) -> list[str]:
    """Names and addresses under which other ranks may reach this host, best first."""
    if job.local_size == job.size:
        return ["127.0.0.1"]
    try:
        addresses = socket.gethostbyname_ex(job.host)[2]
    except OSError:
        addresses = []
    return [job.host, *(address for address in addresses if not address.startswith("127."))]


def first_reachable(names: list[str], port: int, deadline: float) -> str:
    while time.monotonic() < deadline:
        for name in names:
            try:
                socket.create_connection((name, port), timeout=3).close()
            except OSError:
                continue
            return name
        time.sleep(0.1)
    raise Lost(
        f"rank 0 is silent: nothing answers at {' or '.join(f'{name}:{port}' for name in names)}; is rank 0 there, "
        "does the name resolve here, and does a firewall stand between the hosts?"
    )
