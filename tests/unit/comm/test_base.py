"""The tree of a broadcast, simulated for every number of ranks."""

import pytest
import torch

from fedmpi.comm.base import Communicator


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33])
def test_the_tree_reaches_every_rank_once_in_few_steps(size):
    """Sends match receives; every rank except 0 receives once, at most ceil(log2 size) hops from rank 0."""
    sends, expects = [], []
    for rank in range(size):

        def exchange(outgoing, incoming, rank=rank):
            sends.extend((rank, peer) for peer, _ in outgoing)
            expects.extend((peer, rank) for peer, _ in incoming)

        comm = Communicator(torch.device("cpu"), rank, size)
        comm._exchange = exchange
        comm._broadcast(torch.zeros(1))
    assert sorted(sends) == sorted(expects)
    assert sorted(target for _, target in sends) == list(range(1, size))
    depth = {0: 0}
    for source, target in sorted(sends):  # a parent's rank is smaller than its child's
        depth[target] = depth[source] + 1
    assert max(depth.values()) <= (size - 1).bit_length()
