"""torch.distributed: gloo between CPUs, NCCL between GPUs. Control traffic goes through the store, never over NCCL."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedmpi.comm import rendezvous, slurm_hosts
from fedmpi.comm.alarm import Alarm
from fedmpi.comm.base import Communicator, Gone, Lost, Message, relay, within
from fedmpi.comm.job import Job
from fedmpi.comm.store_allgather import GRACE_S, StoreAllgather
from fedmpi.common.errors import UserError

LOOPBACK = "lo"  # Linux's name for it


def connect(
    job: Job, backend: str, device: torch.device, start_timeout_s: float, round_timeout_s: float, alarm: Alarm
) -> Communicator:
    """Find the other ranks, agree with them on a back end that suits their devices, and build its process group."""
    deadline = time.monotonic() + start_timeout_s
    store = rendezvous.find_store(job, start_timeout_s)
    alarm.listen(lambda: rendezvous.another(store))
    allgather = StoreAllgather(store, job.rank, job.size)
    card = {"backend": backend, "host": job.host, "gpu": gpu_uuid(device)}
    cards = [json.loads(text) for text in allgather(json.dumps(card).encode(), max(1.0, deadline - time.monotonic()))]
    chosen = choose(backend, cards)
    choose_interface(cards[job.rank]["host"], [card["host"] for card in cards])
    # gloo's time-out bounds the building of the group only, as each wait has its own. NCCL's is a watchdog that kills
    # the process: it must fire after our own time-out, which can name the rank.
    patience_s = round_timeout_s + 60 if chosen == "nccl" else start_timeout_s
    remedy = (
        "A rank has died since, or the network interface is wrong: set GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) "
        "to one that leads to the other hosts."
    )
    try:
        within(
            patience_s + GRACE_S,
            lambda: dist.init_process_group(
                chosen,
                store=dist.PrefixStore("group", store),
                rank=job.rank,
                world_size=job.size,
                timeout=timedelta(seconds=patience_s),
                device_id=torch.empty(0, device=device).device if chosen == "nccl" else None,  # "cuda" with its index
            ),
            f"all ranks came, but {chosen} has not connected them after {patience_s:.0f} s.\n{remedy}",
        )
    except RuntimeError as error:
        if isinstance(error, Lost):
            raise
        said = rendezvous.line(error)
        raise Lost(f"all ranks came, but {chosen} does not connect them ({said}).\n{remedy}") from error
    return Nccl(job, device, allgather, round_timeout_s) if chosen == "nccl" else Gloo(job, allgather, round_timeout_s)


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def choose(backend: str, cards: Sequence[dict[str, str]]) -> str:
    """nccl or gloo, for all ranks alike. Raises UserError if ranks disagree or NCCL would refuse.

    A card describes a rank: the back end of its config, its host, the UUID of its GPU ("" for none).
    """
    asked = Counter(card["backend"] for card in cards)
    if len(asked) > 1:
        raise UserError(f"comm.backend differs between ranks: {dict(asked)}; give all ranks one config.")
    without = [rank for rank, card in enumerate(cards) if not card["gpu"]]
    seen: dict[str, int] = {}
    shared = [(seen.setdefault(card["gpu"], rank), rank) for rank, card in enumerate(cards) if card["gpu"]]
    shared = [(first, rank) for first, rank in shared if first != rank]
    if backend == "auto":
        return "gloo" if without or shared else "nccl"
    if backend == "nccl" and without:
        raise UserError(
            f"comm.backend=nccl, but rank {without[0]} on {cards[without[0]]['host']} computes without a GPU "
            f"({len(without)} of {len(cards)} ranks).\nUse comm.backend=gloo (or auto), or give every rank a GPU."
        )
    if backend == "nccl" and shared:
        first, rank = shared[0]
        raise UserError(
            f"comm.backend=nccl, but ranks {first} and {rank} share GPU {cards[rank]['gpu']} of {cards[rank]['host']}, "
            f"which NCCL refuses.\n"
            f"Start one rank fewer and let rank 0 train (server.trains=true), or use comm.backend=gloo."
        )
    return backend


def choose_interface(mine: str, all_hosts: Sequence[str]) -> None:
    """Keep gloo off the loopback interface if the job spans hosts: gloo binds to the address of the host's own name,
    which is 127.0.1.1 in Debian's /etc/hosts; and on it if the job does not. A GLOO_SOCKET_IFNAME set by the user is
    respected."""
    others = [host for host in all_hosts if host != mine]
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if not others:
        if LOOPBACK in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        return
    try:
        loopback = socket.gethostbyname(mine).startswith("127.")
    except OSError:
        loopback = True
    interface = slurm_hosts.interface_towards(others[0]) if loopback else None
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


@final
class Gloo(Communicator):
    def __init__(self, job: Job, allgather: StoreAllgather, round_timeout_s: float) -> None:
        Communicator.__init__(self, job.rank, job.size, torch.device("cpu"))
        self.job = job
        self.allgather = allgather
        self.round_timeout_s = round_timeout_s

    def _meet(self) -> None:
        self.allgather(b"", self.round_timeout_s)

    def _part(self) -> None:
        part(self.job, self.allgather, self.round_timeout_s)

    def _broadcast(self, x: Tensor) -> None:
        relay(x, self.rank, self.size, self._exchange)

    def _exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        deadline = time.monotonic() + self.round_timeout_s
        works = []
        for post, messages in ((dist.irecv, incoming), (dist.isend, outgoing)):
            for peer, x in messages:
                with self._naming(peer):
                    works.append((peer, cast(dist.Work, post(x, peer))))
        for peer, work in works:
            with self._naming(peer, deadline):
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    @contextmanager
    def _naming(self, peer: int, deadline: float = math.inf) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise Lost(
                    f"rank {peer} is silent: no message from or to it for {self.round_timeout_s:g} s "
                    "(comm.round_timeout_s)"
                ) from error
            raise Gone(f"rank {peer} is dead: its connection has ended") from error

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        return self.allgather(payload, deadline_s)


@final
class Nccl(Communicator):
    def __init__(self, job: Job, device: torch.device, allgather: StoreAllgather, round_timeout_s: float) -> None:
        Communicator.__init__(self, job.rank, job.size, device)
        self.job = job
        self.allgather = allgather
        self.round_timeout_s = round_timeout_s

    def _meet(self) -> None:
        self.allgather(b"", self.round_timeout_s)

    def _part(self) -> None:
        part(self.job, self.allgather, self.round_timeout_s)

    def _broadcast(self, x: Tensor) -> None:
        self._wait(lambda: [dist.broadcast(x, 0, async_op=True)])

    def _exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        operations = [dist.P2POp(dist.isend, x, peer) for peer, x in outgoing]
        operations += [dist.P2POp(dist.irecv, x, peer) for peer, x in incoming]
        if operations:  # NCCL posts them as one group, which cannot deadlock
            self._wait(lambda: dist.batch_isend_irecv(operations))

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        return self.allgather(payload, deadline_s)

    def _wait(self, post: Callable[[], list[dist.Work]]) -> None:
        """NCCL names no peer and cannot be cancelled: past the deadline an allgather finds the silent ranks."""
        deadline = time.monotonic() + self.round_timeout_s
        try:
            works = post()
            while not all(work.is_completed() for work in works):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer for {self.round_timeout_s:.0f} s")
                time.sleep(1e-4)
            for work in works:
                work.wait()
        except RuntimeError as error:
            try:
                self.allgather(b"", GRACE_S)
            except Lost as lost:
                raise Lost(f"NCCL failed ({error}); {lost}") from error
            raise Lost(f"NCCL failed, though all ranks are there ({error})") from error


def part(job: Job, allgather: StoreAllgather, timeout_s: float) -> None:
    """Leave after all ranks have met: closing a socket while its other end still reads could lose the last message."""
    dist.destroy_process_group()
    within(timeout_s + GRACE_S, lambda: allgather.leave(timeout_s), "rank 0 is silent: its store does not answer")
    if job.launcher == "mpi":
        from fedmpi.comm import mpi

        mpi.finalize(job, timeout_s)
