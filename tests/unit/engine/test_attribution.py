"""What a rank sends counts for its own clients alone: their rows, their sizes, their word to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import CPU, federated, prepare, settings

import fedmpi
from fedmpi.comm.base import Communicator, Message, Posted
from fedmpi.engine import sampling
from fedmpi.method import State
from fedmpi.runtime import build_data

SEEN: list = []


@dataclass(frozen=True)
class Watching(fedmpi.Method):
    """FedAvg that remembers what it was given."""

    def aggregate(self, s, up):
        SEEN.append((list(up.clients), up.n.tolist(), up.p.tolist(), up.dw[:, 0].tolist(), up.dw[:, -1].tolist()))
        return up.mean("dw"), State()


class Said(Communicator):
    """Rank 0 of three; whatever it asks of rank r is filled with r, an upload's stop flag with `stop[r]`."""

    def __init__(self, upload: int = 0, stop: dict[int, float] | None = None) -> None:
        Communicator.__init__(self, rank=0, size=3, device=CPU)
        self.upload, self.stop = upload, stop or {}

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        for peer, x in incoming:
            x.fill_(peer)
            if len(x) == self.upload:
                x[2] = self.stop.get(peer, 0.0)  # loss, seconds, stop flag, ... of engine/messages.py
        return []

    def _finish(self, posted: Posted) -> None: ...

    def _broadcast(self, x: torch.Tensor) -> None: ...

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        return [payload] * 3

    def _meet(self) -> None: ...

    def _part(self) -> None: ...

    def abort(self, code: int) -> None:
        raise AssertionError


def watched(stop=None, **changes):
    """The run as rank 0 sees it, all clients being trained by ranks 1 and 2, which say what they like."""
    SEEN.clear()
    config = settings("fedavg", rounds=2, evaluate={"protocol": ["global"]}, **changes)
    config = config.model_copy(update={"method": config.method.model_copy(update={"name": f"{__name__}:Watching"})})
    data = federated()
    size = prepare(config, data).made.messages.upload(0).packing.size
    it = prepare(config, data, Said(size, stop))
    it.reason = it.fed.run()
    return it, data, list(SEEN)


@pytest.mark.parametrize("placement", ["balanced", "pinned"])
def test_rows_are_those_of_the_rank_that_trains_the_client(placement):
    it, data, seen = watched(cohort={"placement": placement})
    assert len(seen) == 2
    for t, (clients, n, p, first, last) in enumerate(seen):
        assert clients == sampling.cohort(0, t, data.clients, 0.6)
        where = it.fed.roster.place(clients)
        assert set(where.values()) == {1, 2}
        assert first == last == [float(where[k]) for k in clients]
        sizes = [float(data.train_sizes[k]) for k in clients]  # the partition's, whatever was sent
        assert n == sizes
        assert p == pytest.approx([size / sum(sizes) for size in sizes])


def test_a_word_to_stop_ends_the_run_and_counts_for_nothing_else():
    """Any rank may be told to stop, and then all do; the round is dropped whole, the model stays what it was."""
    it, _, seen = watched(stop={2: 1.0})
    assert (it.reason, it.rows, seen) == ("stopped", [], [])
    assert torch.equal(it.w, it.w0)


def test_tables_of_silos_are_read_by_owner():
    """Rank 0's view of what the sites say of themselves: a rank has no place in which to speak of another's client."""
    owner = {0: 1, 1: 2, 2: 1, 3: 0}
    table = np.full((4, 3), 7, dtype=np.int64)
    found = build_data.from_owners(Said(), table, owner, ("sizes",))
    assert found.tolist() == [[1] * 3, [2] * 3, [1] * 3, [7] * 3]
