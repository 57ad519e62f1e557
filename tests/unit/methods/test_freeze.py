"""Freeze (3.12): the head is the initial one everywhere, bit for bit; FedBABU trains the same way."""

import pytest
import torch
from helpers import NETS, play, settings

TRAIN = {"momentum": 0.9, "weight_decay": 1e-2}  # either would move weights that an optimiser still holds


@pytest.mark.parametrize("net", NETS)
def test_the_head_is_the_initial_one_everywhere(net):
    it = play(settings("freeze", net, train=TRAIN))
    head, shared = it.made.messages.head, it.made.messages.shared
    assert torch.equal(head.take(it.w), head.take(it.w0))
    assert it.fed.states.rows
    for k in it.fed.states.rows:
        assert torch.equal(it.kept(k)._w, head.take(it.w0))
    assert not torch.equal(shared.take(it.w), shared.take(it.w0))
    assert it.uploads.dw.shape[1:] == (it.w.numel() - head.size,)


@pytest.mark.parametrize("net", NETS)
def test_equals_the_federated_phase_of_fedbabu(net):
    mine, theirs = (play(settings(method, net, train=TRAIN)) for method in ("freeze", "fedbabu"))
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.b, theirs.b)
