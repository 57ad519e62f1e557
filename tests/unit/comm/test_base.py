"""The broadcast's tree, simulated for every number of ranks, and who may use NCCL."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fedmpi.comm.backends import torch_dist
from fedmpi.comm.backends.torch_dist import choose
from fedmpi.comm.base import relay
from fedmpi.common.errors import UserError


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33])
def test_the_tree_reaches_every_rank_once_in_few_steps(size):
    """What ranks send and expect agrees; all but 0 receive once, at most ceil(log2 size) hops from rank 0."""
    sends, expects = [], []
    for rank in range(size):

        def exchange(outgoing, incoming, rank=rank):
            sends.extend((rank, peer) for peer, _ in outgoing)
            expects.extend((peer, rank) for peer, _ in incoming)

        relay(torch.zeros(1), rank, range(size), exchange)
    assert sorted(sends) == sorted(expects)
    assert sorted(target for _, target in sends) == list(range(1, size))
    depth = {0: 0}
    for source, target in sorted(sends):  # a parent's rank is smaller than its child's
        depth[target] = depth[source] + 1
    assert max(depth.values()) <= (size - 1).bit_length()


def cards(backend, *gpus):
    return [{"backend": backend, "host": f"a{rank}", "gpu": gpu} for rank, gpu in enumerate(gpus)]


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [(("x", "y", "z"), "nccl"), (("", "y", "z"), "gloo"), (("x", "y", "x"), "gloo"), (("", ""), "gloo")],
)
def test_auto_is_nccl_only_if_every_rank_has_a_gpu_of_its_own(gpus, chosen):
    assert choose("auto", cards("auto", *gpus)) == chosen


def test_nccl_on_one_gpu_is_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"(?s)ranks 0 and 2 share GPU x of a2.*server.trains=true.*comm.backend=gloo"):
        choose("nccl", cards("nccl", "x", "y", "x"))
    with pytest.raises(UserError, match="rank 1 on a1 computes without a GPU"):
        choose("nccl", cards("nccl", "x", "", "z"))
    assert choose("nccl", cards("nccl", "x", "y")) == "nccl"
    assert choose("gloo", cards("gloo", "x", "x")) == "gloo"


def test_ranks_with_different_back_ends_are_told():
    with pytest.raises(UserError, match="differs between ranks"):
        choose("gloo", [*cards("gloo", ""), *cards("nccl", "x")])


def test_a_group_of_gpus_is_built_on_the_ranks_own(monkeypatch):
    """By a thread, which begins on the first GPU of the host, whatever the rank's is."""
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, device_id: done.append(device_id))
    here = torch.device("meta")  # any that can be named without a GPU
    torch_dist.build("nccl", SimpleNamespace(rank=1, size=3), here, dist.HashStore(), 60)
    assert done == [here, here]
