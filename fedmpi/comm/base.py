"""The interface of every communication back end: flat tensors between ranks, with byte counts and time-outs.

Every rank knows all sizes beforehand, so that only the numbers themselves travel, without headers or pickles.
A tensor is sent from, and received into, its own memory.

    broadcast(x)                              rank 0's x on every rank
    exchange(outgoing, incoming)              a set of point-to-point messages, posted together, then waited for
    post(outgoing, incoming), finish(these)   the same in two halves, with work between them
    allgather_bytes(payload, deadline_s)      a few bytes of each rank on every rank; names all silent ranks
    regroup(payload, deadline_s)              the ranks that live, connected anew, after a loss
    close()                                   leaves in good order, together with all ranks that are left

Ranks keep their numbers when others are lost.
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

from fedmpi.comm.audit import Audit

About = tuple[int | None, tuple[str, ...]]
Message = tuple[int, Tensor]  # (peer, tensor (n,))
Posted = list[Any]  # messages under way, as the back end knows them
ALLGATHER_BYTES = 4096  # the most bytes that a rank may give to one allgather_bytes
START_REMEDY = (  # where ranks do not come to the first allgather
    ".\nHave all ranks been started, on each host with the same number of ranks, address and port, and can each host "
    "reach that address? comm.interface chooses the network (fedmpi doctor lists them), comm.start_timeout_s how long "
    "ranks wait."
)


def ranks(those: Iterable[int], hosts: Mapping[int, str] | None = None) -> str:
    """`rank 2 on node5`, `ranks 1, 3`. hosts: of the ranks, where they are known."""
    hosts = hosts or {}
    names = [f"{rank} on {hosts[rank]}" if rank in hosts else str(rank) for rank in sorted(those)]
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)


class Lost(RuntimeError):  # noqa: N818  (reads as it is meant: `except Lost`)
    """A rank is dead, silent or late; the message names it. The job goes on if all that are left `regroup`."""


def absent_error(
    absent: Iterable[int], size: int, seconds: float, hosts: Mapping[int, str] | None = None, remedy: str = ""
) -> Lost:
    """Return the error for ranks, of `size`, that did not come to an allgather in time."""
    return Lost(f"silent for {seconds:.0f} s: {ranks(absent, hosts)} of {size}{remedy}")


class RankTimeoutError(Lost):
    """No message from or to `peers` for so long. They may wait for others themselves (`find_root_cause`)."""

    def __init__(
        self, peers: Iterable[int], seconds: float, setting: str = "", hosts: Mapping[int, str] | None = None
    ) -> None:
        self.peers, self.seconds, self.setting, self.hosts = sorted(peers), seconds, setting, hosts or {}
        one = len(self.peers) == 1
        super().__init__(
            f"{ranks(self.peers, self.hosts)} {'is' if one else 'are'} silent: "
            f"no message from or to {'it' if one else 'them'} for {seconds:g} s{setting}"
        )

    def blame(self, peers: Iterable[int]) -> RankTimeoutError:
        """Return the same error for other ranks, which are at fault."""
        return RankTimeoutError(peers, self.seconds, self.setting, self.hosts)


class ConnectionLostError(Lost):
    """The connection to a rank has ended. That rank knows why, if it still could say so."""


class Communicator:
    """Sends and receives tensors between the ranks of one job.

    This class checks messages, splits and counts them; its subclasses transfer the bytes through one back end.

    Subclasses override the methods below whose names begin with an underscore. A job of one rank calls none of them.
    """

    begins = True  # whether what is posted is under way before `finish`
    max_elements = 2**30 - 1  # elements sent at once: below the limits of the 32-bit counts of MPI, gloo and NCCL
    can_regroup = "this way of starting ranks cannot do without one"  # why not; "" where it can

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1, patience_s: float = math.inf) -> None:
        self.rank = rank
        self.size = size
        self.alive = list(range(size))  # the ranks that take part, ascending
        self.hosts = dict[int, str]()  # of all ranks, once they are known; for messages
        self.round_timeout_s = patience_s  # comm.round_timeout_s
        self.patience_s = patience_s  # seconds for one message, including the training before it
        self.device = torch.empty(0, device=device).device  # where message tensors must live; "cuda" becomes "cuda:0"
        self.waiting_for: Iterable[int] = ()  # the ranks for whose messages this one waits, or waited in vain
        self.sent_bytes = 0
        self.received_bytes = 0
        self.audit: Audit | None = None  # told of all that leaves this rank
        self.about: About = None, ()  # round and slots of the next `exchange`, for the audit
        self.at_end: Callable[[], None] = lambda: None  # called once every rank has come to its end

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x (n,) on every rank with that of rank 0. Raises Lost past patience_s.

        Rank 0 counts the bytes of x as sent once per receiver (once if it is alone), every other rank as received.
        """
        self._check(x)
        if self.size > 1:
            for piece in self._pieces(x):
                self._broadcast(piece)
        if self.rank == 0:
            self.sent_bytes += x.nbytes * max(1, len(self.alive) - 1)
        else:
            self.received_bytes += x.nbytes

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send all of `outgoing` and fill all of `incoming`; returns when both are done.

        Between two ranks messages arrive in the order of the lists; lengths and types must agree on both sides. A
        message to oneself is a copy, counted like any other. Raises Lost past patience_s, naming the peer.
        """
        self.finish(self.post(outgoing, incoming))

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        """Begin an exchange: until `finish` has returned the messages' memory is not to be touched.

        Of several that are under way the messages between two ranks arrive in the order in which they were posted.
        """
        for peer, x in (*outgoing, *incoming):
            self._check(x, peer)
        if self.audit is not None:
            for peer, x in outgoing:
                if peer != self.rank:
                    self.audit.sent(self.about, peer, x)
        self.about = None, ()
        to_self = [x for peer, x in outgoing if peer == self.rank]
        from_self = [x for peer, x in incoming if peer == self.rank]
        for source, target in zip(to_self, from_self, strict=True):
            target.copy_(source)
        self.sent_bytes += sum(x.nbytes for _, x in outgoing)
        self.received_bytes += sum(x.nbytes for _, x in incoming)
        return self._post(self._cut(outgoing), self._cut(incoming)) if self.size > 1 else []

    def finish(self, posted: Posted) -> None:
        """Wait for what one `post` has begun. Raises Lost patience_s after this call, naming the peer."""
        if self.size > 1:
            self._finish(posted)

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's value, which JSON can hold, on every rank. value: any on the other ranks."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)], device=self.device)
        self.broadcast(size)
        body = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(self.device)
        self.broadcast(body)
        return json.loads(bytes(body.tolist()))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the bytes sent and received within out of the counts."""
        counted = self.sent_bytes, self.received_bytes
        try:
            yield
        finally:
            self.sent_bytes, self.received_bytes = counted

    def silent(self, peers: Iterable[int]) -> RankTimeoutError:
        """What to raise where patience has ended."""
        setting = " (comm.round_timeout_s)" * (self.patience_s == self.round_timeout_s)
        return RankTimeoutError(peers, self.patience_s, setting, self.hosts)

    def count_own(self, nbytes: int) -> None:
        """Count a message to oneself that needs no copy."""
        self.sent_bytes += nbytes
        self.received_bytes += nbytes

    def allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        """The payloads of all ranks of `alive`, in its order; a payload has at most ALLGATHER_BYTES bytes.

        Raises Lost past the deadline, naming the silent ranks.
        """
        if len(payload) > ALLGATHER_BYTES:
            raise ValueError(f"a payload has at most {ALLGATHER_BYTES} bytes a rank, not {len(payload)}")
        if self.size == 1:
            return [payload]
        if self.audit is not None and payload:
            self.audit.said((None, ("text",)), "all", payload)
        return self._allgather_bytes(payload, deadline_s)

    def regroup(self, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        """Go on without the ranks that are dead or frozen: sets `alive`; {rank: its payload} for all of it.

        To be called on every rank after Lost; whoever has not met it yet does so at its next message, if not before.
        Ranks that are busy are waited for until the deadline, ranks that are dead or frozen are not; one of these that
        wakes up later ends by itself. Raises Lost where that cannot be, as when rank 0 is dead.
        """
        raise Lost(f"the job cannot go on without a rank: {self.can_regroup}")

    def close(self) -> None:
        """Leave the job in good order; every rank calls this once, after its last message. Raises Lost as others do."""
        self.allgather_bytes(b"", self.round_timeout_s)
        self.at_end()
        if self.size > 1:
            self._shutdown()

    def _shutdown(self) -> None:
        """Close what connects this rank to the others."""
        raise NotImplementedError

    def _broadcast(self, x: Tensor) -> None:
        """Broadcast at most `max_elements` entries down a binomial tree of messages, which can name a late peer."""
        parent, children = tree(self.alive.index(self.rank), len(self.alive))
        if self.rank:
            self._exchange([], [(self.alive[parent], x)])
        self._exchange([(self.alive[child], x) for child in reversed(children)], [])

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        raise NotImplementedError

    def _finish(self, posted: Posted) -> None:
        raise NotImplementedError

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        raise NotImplementedError

    def _exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        self._finish(self._post(outgoing, incoming))

    def _check(self, x: Tensor, peer: int = 0) -> None:
        if x.dim() != 1 or not x.is_contiguous() or x.device != self.device:
            raise ValueError(
                f"a message is a contiguous tensor (n,) on {self.device}, "
                f"not one of shape {tuple(x.shape)}, strides {x.stride()} on {x.device}"
            )
        if not 0 <= peer < self.size:
            raise ValueError(f"peer {peer} is not a rank: there are {self.size}")

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        return (x[start : start + self.max_elements] for start in range(0, len(x), self.max_elements))

    def _cut(self, messages: Sequence[Message]) -> list[Message]:
        return [(peer, piece) for peer, x in messages if peer != self.rank for piece in self._pieces(x)]


@final
class Solo(Communicator):
    """One process that is server and clients at once: nothing travels, but everything is counted as if it did."""

    can_regroup = "there is a single process"


def tree(me: int, size: int) -> tuple[int, list[int]]:
    """(parent, children) of a place in a binomial tree of `size` places, whose root is 0.

    The parent of a place is its number without the lowest set bit; its children have one more bit set, below that one.

    >>> tree(0, 6), tree(4, 6)
    ((0, [1, 2, 4]), (0, [5]))
    """
    lowest = me & -me if me else size
    bits = [1 << i for i in range(size.bit_length()) if 1 << i < lowest]
    return me & (me - 1) if me else 0, [me + bit for bit in bits if me + bit < size]
