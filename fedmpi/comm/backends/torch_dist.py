"""The back ends of torch.distributed: gloo between CPUs, NCCL between GPUs.

Control messages are sent through the ranks' key-value store (comm/rendezvous), never over NCCL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedmpi.comm import launchers, network
from fedmpi.comm.backends.choice import NCCL_REMEDY, choose_backend, describe_rank, shorten_error
from fedmpi.comm.base import (
    START_REMEDY,
    Communicator,
    ConnectionLostError,
    Message,
    Posted,
    RankLostError,
    format_ranks,
)
from fedmpi.comm.failures.error_reporter import ErrorReporter
from fedmpi.comm.failures.group_membership import GroupMembership
from fedmpi.comm.launchers import Job
from fedmpi.comm.rendezvous import lookup
from fedmpi.comm.rendezvous.store import CANCELLED, REGROUPING, RankStore, allgather, wait_for_all_to_leave
from fedmpi.comm.timeouts import Timeouts

Group = Any  # dist.ProcessGroupGloo, whose type stub lacks some methods
ENDED_RANK_KEY = "ended"  # key of the store: the first rank whose process has ended, which NCCL does not notice
CHECK_INTERVAL_S = 1.0  # interval at which this key is checked
GLOO_REMEDY = (
    "A rank has died meanwhile, or the network interface is wrong: set comm.interface to an interface that leads to "
    "the "
    "other hosts (`fedmpi doctor` lists the interfaces)."
)


def connect(
    job: Job,
    backend: str,
    device: torch.device,
    timeouts: Timeouts,
    error_reporter: ErrorReporter,
    address: str = "",
) -> Communicator:
    """Find the other ranks, choose gloo or NCCL together with them, and create the process group.

    Args:
        job: this process's rank, and the number of ranks.
        backend: comm.backend.
        device: the device that this rank computes on.
        timeouts: limits of the individual steps, in seconds.
        error_reporter: reports errors to all ranks; it listens to the other ranks as soon as the store is found.
        address: the address of comm.interface; "" if it is not set.

    Raises:
        UserError: the launcher or the config contains a mistake.
        RankLostError: ranks did not arrive in time, or could not connect to each other.
    """
    deadline = timeouts.clock.now() + timeouts.start
    store = lookup.connect_to_store(job, timeouts.start, timeouts=timeouts, interface=address)
    error_reporter.listen(store.open_connection)
    own_address, store_address = store.get_ip_addresses()
    description = describe_rank(backend, job.host, device) | {
        "network": network.get_network_stack_id(),
        "address": own_address,
    }
    left_s = max(1.0, deadline - timeouts.clock.now())
    payload, all_ranks = json.dumps(description).encode(), range(job.size)
    descriptions = [
        json.loads(text) for text in allgather(store, "cards", 0, job.rank, all_ranks, payload, left_s, START_REMEDY)
    ]
    chosen = choose_backend(backend, descriptions)
    network.set_gloo_interface(job.rank, descriptions, store_address)
    remedy = NCCL_REMEDY if chosen == "nccl" else GLOO_REMEDY
    # Gloo's time-out bounds only the creation of the group, since each wait has its own limit. NCCL's time-out also
    # bounds every message, by a watchdog: it must be longer than our own time-out, which can name the rank.
    timeout_s = timeouts.round + 60 if chosen == "nccl" else timeouts.start
    try:
        connects = partial(create_process_group, chosen, job, device, store, timeout_s)
        group = timeouts.clock.call_with_timeout(timeouts.start + timeouts.reply, connects)
    except TimeoutError:
        late = f"{chosen} has not connected them within {timeouts.start:.0f} s"
        raise RankLostError(f"all ranks have arrived, but {late}.\n{remedy}") from None
    except RuntimeError as error:
        # Errors that do not come from NCCL, such as a lack of memory, have a remedy of their own.
        if isinstance(error, RankLostError) or (chosen == "nccl" and not isinstance(error, dist.DistError)):
            raise
        raise RankLostError(
            f"all ranks have arrived, but {chosen} cannot connect them ({shorten_error(error)}).\n{remedy}"
        ) from error
    if chosen == "nccl":
        store.set_on_disconnect(ENDED_RANK_KEY, str(job.rank))
        return NcclCommunicator(job, device, store, timeouts)
    return GlooCommunicator(job, group, store, GroupMembership(store, job.rank, job.size, error_reporter), timeouts)


def create_process_group(
    backend: str, job: Job, device: torch.device, store: dist.Store, timeout_s: float
) -> Group | None:
    """Create the process group that connects all ranks.

    NCCL's group becomes torch's default group, and None is returned. Gloo's group is returned, so that it can be
    released when the ranks regroup.
    """
    if backend == "gloo":
        return create_gloo_group(store, "group", job.rank, job.size, timeout_s)
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:  # older name of the variable
        # Torch's watchdog would end this process at an error, before the ranks find out which of them has failed.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    patience = timedelta(seconds=timeout_s)
    where = torch.empty(0, device=device).device  # "cuda" with its index
    torch.cuda.set_device(where)  # this runs in a new thread, which begins on the first GPU
    store = dist.PrefixStore("group", store)
    dist.init_process_group(backend, None, patience, job.size, job.rank, store, device_id=where)
    return None


def create_gloo_group(store: dist.Store, name: str, number: int, size: int, timeout_s: float) -> Group:
    """Connect `size` processes by gloo and return their process group.

    Args:
        store: the store through which the processes find each other.
        name: prefix of the keys in the store.
        number: number of this process in the group.
        size: number of processes.
        timeout_s: limit in seconds.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), number, size, timedelta(seconds=timeout_s))


class _StoreCommunicator(Communicator):
    """The base class of the back ends of torch.distributed, whose control messages are sent through the store."""

    def __init__(self, job: Job, device: torch.device, store: RankStore, timeouts: Timeouts) -> None:
        Communicator.__init__(self, device, job.rank, job.size, timeouts.round)
        self.job, self.store, self.timeouts = job, store, timeouts
        self.num_allgathers = 0  # number of allgather calls so far; each call has keys of its own
        self.group_name = "allgather"

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        self.num_allgathers += 1  # from now on a regroup can cancel this call
        self._raise_if_others_regroup()
        values = allgather(self.store, self.group_name, self.num_allgathers, self.rank, self.alive, payload, deadline_s)
        self._raise_if_others_regroup()
        return values

    def _raise_if_others_regroup(self) -> None:
        """Raise RankLostError if the other ranks wait for this rank to regroup (GlooCommunicator only)."""

    def _shutdown(self) -> None:
        """Wait for all ranks before disconnecting: closing a socket while the other end still reads could lose data."""
        wait_for_all_to_leave(self.store, self.rank, self.alive, self.timeouts.round)
        if self.job.launcher == "mpi" and len(self.alive) == self.size:  # MPI_Finalize would wait for a lost rank
            from fedmpi.comm.backends import mpi

            mpi.finalize_mpi(self.job, self.timeouts.round)


@final
class GlooCommunicator(_StoreCommunicator):
    """The communicator that uses gloo, for tensors on the CPU. It can regroup after a rank failure."""

    def __init__(
        self,
        job: Job,
        group: Group | None,
        store: RankStore,
        membership: GroupMembership,
        timeouts: Timeouts,
        create_group: Callable[[dist.Store, str, int, int, float], Group] = create_gloo_group,
    ) -> None:
        _StoreCommunicator.__init__(self, job, torch.device("cpu"), store, timeouts)
        self.create_group = create_group
        self.group, self.failed_group, self.failure_text = (
            group,
            None,
            "",
        )  # the group in use; a group that has failed, and the reason
        self.group_numbers = {rank: rank for rank in self.alive}  # rank -> number in the group
        self.membership = membership
        membership.cancel_wait = self._cancel_allgather
        self.can_regroup = launchers.explain_why_failure_ends_job(job, os.environ)

    def _shutdown(self) -> None:
        self.group = self.failed_group = None
        _StoreCommunicator._shutdown(self)

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        if not outgoing and not incoming:
            return []
        if self.group is None:
            raise ConnectionLostError(self.failure_text)
        works: Posted = []
        peer, post = 0, None
        try:
            for post, messages in ((self.group.recv, incoming), (self.group.send, outgoing)):
                for peer, x in messages:
                    works.append((peer, post([x], self.group_numbers[peer], 0), x))
            return works
        except RuntimeError as error:
            post = None
            works.clear()
            self._give_up_group(peer, error)

    def _wait_for_posted(self, posted: Posted) -> None:
        clock = self.timeouts.clock
        deadline = clock.now() + self.message_timeout_s
        peer, work = 0, None
        try:
            for peer, work, _ in posted:
                self.waiting_for = (peer,)
                # Gloo drops fractions of a millisecond; without the extra one, `wait` would return too early.
                work.wait(timedelta(seconds=max(0.001, deadline - clock.now() + 0.001)))
            self.waiting_for = ()
        except RuntimeError as error:
            work = None
            posted.clear()
            self._give_up_group(peer, error, late=clock.now() >= deadline)

    def _give_up_group(self, peer: int, error: RuntimeError, late: bool = False) -> NoReturn:
        """Stop using the process group after a message to or from rank `peer` has failed, and raise RankLostError.

        late: whether the message timed out; a RankTimeoutError is raised in this case.

        The group is kept in `failed_group`, and the traceback of `error` is removed so that it does not refer to the
        group. When the ranks regroup, the group is therefore released and its sockets close, which tells the other
        ranks of the failure. If the job ends instead, the sockets stay open, so that ranks with working connections do
        not report this rank as lost.
        """
        error.__traceback__ = None
        self.failed_group, self.group = self.group, None
        lost = (
            self.make_timeout_error([peer])
            if late
            else RankLostError(f"{format_ranks([peer], self.hosts)} is dead: its connection has ended")
        )
        self.failure_text = str(lost)
        raise (lost if late else ConnectionLostError(self.failure_text)) from error

    def regroup(self, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        self.group = self.failed_group = None
        self.group, payloads = self.membership.regroup(payload, deadline_s, self._connect)
        self.alive = list(payloads)
        self.group_numbers = {rank: place for place, rank in enumerate(self.alive)}
        self.group_name, self.num_allgathers = f"allgather {self.membership.generation}", 0
        return payloads

    def _raise_if_others_regroup(self) -> None:
        if self.membership.regroup_requested():
            raise RankLostError(REGROUPING)

    def _cancel_allgather(self, store: dist.Store) -> None:
        """Cancel the current allgather on all ranks, because they regroup.

        store: a connection to the store that belongs to the calling thread, which is not the main thread.
        """
        store.compare_set(f"{self.group_name}/{self.num_allgathers}/silent", "", CANCELLED)

    def _connect(self, store: dist.Store, generation: int, members: list[int]) -> Group | None:
        if len(members) == 1:
            return None
        place, limit_s = members.index(self.rank), self.timeouts.connect
        return self.create_group(store, f"group {generation}", place, len(members), limit_s)


@final
class NcclCommunicator(_StoreCommunicator):
    """The communicator that uses NCCL, for tensors on GPUs. It cannot regroup."""

    async_sends = False
    can_regroup = "NCCL cannot reconnect the remaining ranks (set comm.backend: gloo)"

    def __init__(self, job: Job, device: torch.device, store: RankStore, timeouts: Timeouts) -> None:
        _StoreCommunicator.__init__(self, job, device, store, timeouts)
        self.unstarted: list[Posted] = []  # operations that have been posted but not started

    def _shutdown(self) -> None:
        dist.destroy_process_group()
        _StoreCommunicator._shutdown(self)

    def _broadcast(self, x: Tensor) -> None:
        self._wait([*self.alive[1:]] if self.rank == 0 else [0], lambda: [dist.broadcast(x, 0, async_op=True)])

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        """Collect the messages; the next `_wait_for_posted` starts all collected messages as one NCCL group.

        Within a group, sends and receives in any order cannot deadlock; started one by one, they could wait for each
        other.
        """
        operations = [dist.P2POp(dist.isend, x, peer) for peer, x in outgoing]
        operations += [dist.P2POp(dist.irecv, x, peer) for peer, x in incoming]
        self.unstarted.append(operations)
        return operations

    def _wait_for_posted(self, posted: Posted) -> None:
        if any(
            each is posted for each in self.unstarted
        ):  # otherwise an earlier `_wait_for_posted` has already sent these
            operations, self.unstarted = [each for several in self.unstarted for each in several], []
            if operations:
                self._wait({each.peer for each in operations}, lambda: dist.batch_isend_irecv(operations))

    def _wait(self, peers: Iterable[int], post: Callable[[], list[dist.Work]]) -> None:
        """Call post(), which starts operations, and wait until they are complete.

        NCCL's errors do not name a peer. After an error, an allgather therefore determines which rank is lost.

        Raises:
            RankLostError: an operation fails, or takes longer than message_timeout_s.
        """
        clock = self.timeouts.clock
        deadline, self.waiting_for = clock.now() + self.message_timeout_s, peers
        try:
            works, look = post(), clock.now() + CHECK_INTERVAL_S
            while not all(work.is_completed() for work in works):
                if clock.now() > deadline:
                    raise self.make_timeout_error(peers)
                if clock.now() > look:
                    if self.store.check([ENDED_RANK_KEY]):
                        rank = int(self.store.get(ENDED_RANK_KEY))
                        raise ConnectionLostError(f"{format_ranks([rank], self.hosts)} is dead: its process has ended")
                    look = clock.now() + CHECK_INTERVAL_S
                clock.sleep(1e-4)
            for work in works:
                work.wait()
            self.waiting_for = ()
        except RankLostError:
            raise
        except RuntimeError as error:
            try:
                self.allgather_bytes(b"", self.timeouts.reply)
            except RankLostError as lost:
                raise RankLostError(f"NCCL failed ({shorten_error(error)}); {lost}") from error
            remedy = f".\n{NCCL_REMEDY}" if isinstance(error, dist.DistError) else ""
            raise RankLostError(
                f"NCCL failed, although all ranks are alive ({shorten_error(error)}){remedy}"
            ) from error
