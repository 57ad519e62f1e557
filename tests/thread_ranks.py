"""Run ranks as threads of one process, any of which may die at any message or time out, to test rank failures."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedmpi.comm.base import Communicator, ConnectionLostError, Message, Posted, RankLostError

LIMIT_S = 60.0
FOR_EVER = AssertionError("a rank waits for ever")


class RankDied(BaseException):
    """Raised in the thread of a rank to end it."""


class SharedState:
    """The state that the ranks share: queues of messages, the dead ranks, and the votes of those that regroup."""

    def __init__(self, size: int, dies: dict[int, Sequence[int]]) -> None:
        """Create the shared state of `size` ranks.

        Args:
            size: number of ranks.
            dies: {rank: numbers of messages}, counted from 1; the rank dies before the first of these messages.
        """
        self.size, self.dies = size, dies
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)  # generation, from, to
        self.dead: set[int] = set()
        self.generation = 0
        self.members: dict[int, list[int]] = {}  # by generation
        self.votes: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.texts: dict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)

    def wait(self, true: Callable[[], bool], patience_s: float = LIMIT_S, late: Exception = FOR_EVER) -> None:
        if not self.changed.wait_for(true, min(patience_s, LIMIT_S)):
            raise late if patience_s < LIMIT_S else FOR_EVER


class ThreadCommunicator(Communicator):
    """The communicator of one rank that is a thread."""

    can_regroup = ""

    def __init__(self, shared: SharedState, rank: int) -> None:
        Communicator.__init__(self, torch.device("cpu"), rank, shared.size)
        self.shared, self.generation, self.count, self.gathers = shared, 0, 0, 0
        self.message_timeout_s = LIMIT_S

    def step(self) -> None:
        """Count a message, and end the rank if it is to die before this message."""
        self.count += 1
        shared = self.shared
        if self.count in shared.dies.get(self.rank, ()):
            with shared.changed:
                shared.dead.add(self.rank)
                shared.changed.notify_all()
            raise RankDied
        if shared.generation > self.generation:
            raise ConnectionLostError("the group is broken")

    def _broadcast(self, x: torch.Tensor) -> None:
        if self.rank == 0:
            self._exchange([(rank, x) for rank in self.alive if rank], [])
        else:
            self._exchange([], [(0, x)])

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        self.step()
        shared, mine = self.shared, self.generation
        with shared.changed:
            for peer, x in outgoing:
                if peer in shared.dead:
                    raise ConnectionLostError(f"rank {peer} is dead")
                shared.boxes[mine, self.rank, peer].append(x.clone())
            shared.changed.notify_all()
        return [(mine, peer, x) for peer, x in incoming]

    def _wait_for_posted(self, posted: Posted) -> None:
        shared = self.shared
        with shared.changed:
            for mine, peer, x in posted:
                box = shared.boxes[mine, peer, self.rank]
                shared.wait(
                    lambda box=box, peer=peer, mine=mine: bool(box) or peer in shared.dead or shared.generation > mine,
                    self.message_timeout_s,
                    self.make_timeout_error([peer]),
                )
                if not box:
                    raise ConnectionLostError(f"rank {peer} is dead" if peer in shared.dead else "the group is broken")
                x.copy_(box.popleft())

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        self.step()
        shared, mine = self.shared, self.generation
        self.gathers += 1
        with shared.changed:
            texts = shared.texts[mine, self.gathers]
            texts[self.rank] = payload
            shared.changed.notify_all()
            broken = lambda: bool(shared.dead & set(self.alive)) or shared.generation > mine  # noqa: E731
            shared.wait(lambda: len(texts) == len(self.alive) or broken())
            if len(texts) < len(self.alive):
                raise ConnectionLostError("the group is broken")
            return [texts[rank] for rank in self.alive]

    def regroup(self, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        shared = self.shared
        while True:
            with shared.changed:
                if 0 in shared.dead:
                    raise RankLostError("rank 0 is dead")
                mine = self.generation = self.generation + 1
                shared.generation = max(shared.generation, mine)
                shared.votes[mine][self.rank] = payload
                shared.changed.notify_all()
                votes = shared.votes[mine]
                if self.rank == 0:
                    shared.wait(lambda mine=mine: not set(self.alive) - shared.dead - set(shared.votes[mine]))
                    shared.members[mine] = sorted(set(votes) - shared.dead)
                    shared.changed.notify_all()
                shared.wait(lambda mine=mine: mine in shared.members or 0 in shared.dead or shared.generation > mine)
                if mine not in shared.members:
                    continue
                self.alive = shared.members[mine]
                self.gathers = 0
            return {rank: votes[rank] for rank in self.alive}

    def _shutdown(self) -> None: ...


def run_in_threads(
    size: int, dies: dict[int, Sequence[int]], make: Callable[[ThreadCommunicator], Any], one: Callable[[Any], Any]
) -> dict[int, Any]:
    """Run one(make(communicator)) for each rank in a thread.

    The calls of `make` run one after another, because torch's global generator draws the initial weights.

    Returns:
        {rank: the result, or the error that was raised}, without ranks that have died.
    """
    shared, found = SharedState(size, dies), dict[int, Any]()
    made = [make(ThreadCommunicator(shared, rank)) for rank in range(size)]

    def body(rank: int) -> None:
        try:
            found[rank] = one(made[rank])
        except RankDied:
            return
        except Exception as error:
            found[rank] = error
            with shared.changed:  # wake ranks that wait for this one
                shared.dead.add(rank)
                shared.changed.notify_all()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank does not end"
    return found
