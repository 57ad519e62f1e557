"""The interface of all communication back ends, which send flat tensors between ranks and count the bytes sent.

Every rank knows the sizes of all messages in advance, so messages have no headers and nothing is pickled. Tensors are
sent from, and received into, their own memory.

    broadcast(x)                               copy rank 0's x to every rank
    exchange(outgoing, incoming)               start several point-to-point messages, then wait for all of them
    post(outgoing, incoming), finish(posted)   the same in two calls, with computation between them
    allgather_bytes(payload, deadline_s)       send a few bytes from each rank to all ranks; errors name ranks that are
                                               late
    regroup(payload, deadline_s)               reconnect the remaining ranks after a rank failure
    close()                                    disconnect, together with all remaining ranks

Ranks keep their numbers when other ranks are lost.
A message is a contiguous tensor (n,) of any element type on `Communicator.device`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from fedmpi.comm.audit import AuditLog

MessageInfo = tuple[int | None, tuple[str, ...]]
Message = tuple[int, Tensor]  # (peer, tensor (n,))
Posted = list[Any]  # messages that `post` has started, in the types of the back end
ALLGATHER_BYTES = 4096  # maximum length of a rank's payload in allgather_bytes
START_REMEDY = (  # advice if ranks do not call the first allgather
    ".\nCheck that all ranks were started, with the same number of ranks, address and port on each host, and that each "
    "host can reach that address. comm.interface selects the network (`fedmpi doctor` lists the interfaces); "
    "comm.start_timeout_s sets how long ranks wait."
)


def format_ranks(numbers: Iterable[int], hosts: Mapping[int, str] | None = None) -> str:
    """Format rank numbers for a message: "rank 2 on node5" or "ranks 1, 3".

    Args:
        hosts: rank -> host name, for the ranks whose host is known.
    """
    hosts = hosts or {}
    names = [f"{rank} on {hosts[rank]}" if rank in hosts else str(rank) for rank in sorted(numbers)]
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)


class RankLostError(RuntimeError):
    """A rank, named in the message, is dead, unresponsive or late. The others can continue if all of them `regroup`."""


def make_missing_ranks_error(
    missing: Iterable[int], size: int, timeout_s: float, hosts: Mapping[int, str] | None = None, remedy: str = ""
) -> RankLostError:
    """Create the error for ranks that have not called an allgather in time.

    Args:
        missing: the ranks that have not called it.
        size: number of ranks of the job.
        timeout_s: the time limit in seconds.
        hosts: rank -> host name, for the ranks whose host is known.
        remedy: advice at the end of the message.
    """
    return RankLostError(
        f"no message for {timeout_s:.0f} s from {format_ranks(missing, hosts)} (of {size} ranks){remedy}"
    )


class RankTimeoutError(RankLostError):
    """No message could be exchanged with the ranks `peers` within `seconds`.

    setting: text for the message that names the config key of this limit; "" if the limit has no key.

    The peers may themselves be waiting for other ranks (see ErrorReporter.find_root_cause).
    """

    def __init__(
        self, peers: Iterable[int], seconds: float, setting: str = "", hosts: Mapping[int, str] | None = None
    ) -> None:
        self.peers, self.seconds, self.setting, self.hosts = sorted(peers), seconds, setting, hosts or {}
        one = len(self.peers) == 1
        super().__init__(
            f"{format_ranks(self.peers, self.hosts)} {'is' if one else 'are'} silent: "
            f"no message from or to {'it' if one else 'them'} for {seconds:g} s{setting}"
        )

    def with_other_peers(self, peers: Iterable[int]) -> RankTimeoutError:
        """Return a copy of this error that names different ranks: those that caused the time-out."""
        return RankTimeoutError(peers, self.seconds, self.setting, self.hosts)


class ConnectionLostError(RankLostError):
    """The connection to a rank has ended. That rank has reported the cause itself, if it was able to."""


class Communicator:
    """Sends and receives tensors between the ranks of one job.

    This class validates, splits and counts messages; each subclass transfers the bytes through one back end.

    A subclass overrides the methods below whose names begin with an underscore. In a job of one rank these methods are
    never called.
    """

    async_sends = True  # whether messages are sent in the background between `post` and `finish`
    max_elements = 2**30 - 1  # elements per message: below the limits of the 32-bit counts of MPI, gloo and NCCL
    can_regroup = "this launcher cannot continue without a rank"  # why ranks cannot regroup; "" if they can

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1, timeout_s: float = math.inf) -> None:
        self.rank = rank
        self.size = size
        self.alive = list(range(size))  # the ranks that take part, in ascending order
        self.hosts = dict[int, str]()  # rank -> host name, once they are known; for error messages
        self.round_timeout_s = timeout_s  # comm.round_timeout_s, in seconds
        self.message_timeout_s = timeout_s  # seconds for one message, including the training before it
        self.device = torch.empty(0, device=device).device  # device of all message tensors; "cuda" becomes "cuda:0"
        self.waiting_for: Iterable[
            int
        ] = ()  # the ranks whose messages this rank waits for, or waited for until a time-out
        self.sent_bytes = 0
        self.received_bytes = 0
        self.audit: AuditLog | None = None  # records all messages that this rank sends
        self.message_info: MessageInfo = None, ()  # round and slots of the next `exchange`, for the audit
        self.on_close: Callable[[], None] = lambda: None  # called once every rank has called `close`

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x (n,) on every rank with rank 0's x.

        Rank 0 counts the bytes of x as sent once per receiver (once in a job of one rank); every other rank counts
        them as received.

        Raises:
            RankLostError: the broadcast takes longer than message_timeout_s.
        """
        self._check_message(x)
        if self.size > 1:
            for piece in self._split_tensor(x):
                self._broadcast(piece)
        if self.rank == 0:
            self.sent_bytes += x.nbytes * max(1, len(self.alive) - 1)
        else:
            self.received_bytes += x.nbytes

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send the tensors of `outgoing`, receive into the tensors of `incoming`, and wait until both are complete.

        Messages between two ranks arrive in the order of the lists; lengths and dtypes must agree on both sides. A
        message from a rank to itself is copied, and is counted like any other message.

        Args:
            outgoing: (receiving rank, tensor (n,)) pairs.
            incoming: (sending rank, tensor (n,)) pairs.

        Raises:
            RankLostError: a message takes longer than message_timeout_s; the error names the peer.
        """
        self.finish(self.post(outgoing, incoming))

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        """Start an exchange, and return its messages for `finish`; do not use the tensors until `finish` has returned.

        If several exchanges are pending, messages between two ranks arrive in the order in which they were posted.
        """
        for peer, x in (*outgoing, *incoming):
            self._check_message(x, peer)
        if self.audit is not None:
            for peer, x in outgoing:
                if peer != self.rank:
                    self.audit.record_tensor(self.message_info, peer, x)
        self.message_info = None, ()
        to_self = [x for peer, x in outgoing if peer == self.rank]
        from_self = [x for peer, x in incoming if peer == self.rank]
        for source, target in zip(to_self, from_self, strict=True):
            target.copy_(source)
        self.sent_bytes += sum(x.nbytes for _, x in outgoing)
        self.received_bytes += sum(x.nbytes for _, x in incoming)
        return self._post(self._split_messages(outgoing), self._split_messages(incoming)) if self.size > 1 else []

    def finish(self, posted: Posted) -> None:
        """Wait for the messages that one call of `post` has started.

        Raises:
            RankLostError: a message takes longer than message_timeout_s; the error names the peer.
        """
        if self.size > 1:
            self._wait_for_posted(posted)

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's value, which must be serialisable as JSON, on every rank; ignore the other ranks' values."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)], device=self.device)
        self.broadcast(size)
        body = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(self.device)
        self.broadcast(body)
        return json.loads(bytes(body.tolist()))

    @contextmanager
    def exclude_from_counts(self) -> Iterator[None]:
        """Exclude the messages sent within the `with` block from the byte counts."""
        counted = self.sent_bytes, self.received_bytes
        try:
            yield
        finally:
            self.sent_bytes, self.received_bytes = counted

    def make_timeout_error(self, peers: Iterable[int]) -> RankTimeoutError:
        """Create the error for messages from or to `peers` that have taken longer than message_timeout_s."""
        setting = " (comm.round_timeout_s)" * (self.message_timeout_s == self.round_timeout_s)
        return RankTimeoutError(peers, self.message_timeout_s, setting, self.hosts)

    def count_local_message(self, nbytes: int) -> None:
        """Count a message of `nbytes` bytes, which this rank sends to itself without a copy, as sent and received."""
        self.sent_bytes += nbytes
        self.received_bytes += nbytes

    def allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        """Send a few bytes from each rank to every rank, and return all payloads in the order of `alive`.

        Args:
            payload: this rank's bytes, at most ALLGATHER_BYTES; lengths may differ between ranks.
            deadline_s: time limit in seconds for all ranks to call this method.

        Raises:
            RankLostError: some ranks did not call this method in time; the message names them.
        """
        if len(payload) > ALLGATHER_BYTES:
            raise ValueError(f"the payload has {len(payload)} bytes; at most {ALLGATHER_BYTES} per rank are allowed")
        if self.size == 1:
            return [payload]
        if self.audit is not None and payload:
            self.audit.record_bytes((None, ("text",)), "all", payload)
        return self._allgather_bytes(payload, deadline_s)

    def regroup(self, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        """Reconnect the ranks that remain after a rank failure, and exchange a payload between them.

        Afterwards `alive` contains the remaining ranks.

        Every rank must call this method after it has caught RankLostError; a rank that has not seen the failure yet
        gets that error at its next message at the latest. The ranks wait for those that are still training, but not for
        dead or frozen (unresponsive) ranks. A frozen rank that wakes up later exits.

        Args:
            payload: bytes that this rank sends to all other ranks.
            deadline_s: time limit in seconds for ranks that are still training.

        Returns:
            Rank -> its payload, for the remaining ranks.

        Raises:
            RankLostError: the job cannot continue, for example because rank 0 is dead.
        """
        raise RankLostError(f"the job cannot continue after a rank failure: {self.can_regroup}")

    def close(self) -> None:
        """Disconnect from the other ranks; every rank calls this method once, after its last message.

        Raises:
            RankLostError: a rank is dead, or did not call this method within round_timeout_s.
        """
        self.allgather_bytes(b"", self.round_timeout_s)
        self.on_close()
        if self.size > 1:
            self._shutdown()

    def _shutdown(self) -> None:
        """Close this rank's connections to the other ranks."""
        raise NotImplementedError

    def _broadcast(self, x: Tensor) -> None:
        """Broadcast at most `max_elements` elements along a binomial tree of messages, so that errors name a peer."""
        parent, children = find_tree_neighbours(self.alive.index(self.rank), len(self.alive))
        if self.rank:
            self._exchange([], [(self.alive[parent], x)])
        self._exchange([(self.alive[child], x) for child in reversed(children)], [])

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        raise NotImplementedError

    def _wait_for_posted(self, posted: Posted) -> None:
        raise NotImplementedError

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        raise NotImplementedError

    def _exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        self._wait_for_posted(self._post(outgoing, incoming))

    def _check_message(self, x: Tensor, peer: int = 0) -> None:
        if x.dim() != 1 or not x.is_contiguous() or x.device != self.device:
            raise ValueError(
                f"a message must be a contiguous tensor (n,) on {self.device}, "
                f"but it has shape {tuple(x.shape)} and strides {x.stride()} on {x.device}"
            )
        if not 0 <= peer < self.size:
            raise ValueError(f"peer {peer} is not a rank; ranks are 0 to {self.size - 1}")

    def _split_tensor(self, x: Tensor) -> Iterator[Tensor]:
        return (x[start : start + self.max_elements] for start in range(0, len(x), self.max_elements))

    def _split_messages(self, messages: Sequence[Message]) -> list[Message]:
        return [(peer, piece) for peer, x in messages if peer != self.rank for piece in self._split_tensor(x)]


@final
class SingleProcess(Communicator):
    """The communicator of a job of one process, which is the server and all clients; it only counts messages."""

    can_regroup = "the job has a single process"


def find_tree_neighbours(node: int, size: int) -> tuple[int, list[int]]:
    """Return the parent and the children of a node in a binomial tree of `size` nodes with root 0.

    Clearing the lowest set bit of a node's number gives its parent. Setting one bit below that bit gives a child.

    >>> find_tree_neighbours(0, 6), find_tree_neighbours(4, 6)
    ((0, [1, 2, 4]), (0, [5]))
    """
    lowest = node & -node if node else size
    bits = [1 << i for i in range(size.bit_length()) if 1 << i < lowest]
    return node & (node - 1) if node else 0, [node + bit for bit in bits if node + bit < size]
