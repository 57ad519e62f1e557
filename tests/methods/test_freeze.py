"""Freeze (3.12): the head is the initial one everywhere, bit for bit; FedBABU trains the same way."""

import pytest
import torch
from helpers import NETS, play, prepare, settings

TRAIN = {"momentum": 0.9, "weight_decay": 1e-2}  # either would move weights that an optimiser still holds


@pytest.mark.parametrize("net", NETS)
def test_the_head_is_the_initial_one_everywhere(net):
    it = play(settings("freeze", net, train=TRAIN))
    wire, first = it.made.wire, it.fed.clients.w0
    assert torch.equal(wire.head.take(it.w), wire.head.take(first))
    for row in it.fed.clients.kept.values():
        assert torch.equal(wire.kept.views(row)._w, wire.head.take(first))
    assert not torch.equal(wire.shared.take(it.w), wire.shared.take(first))
    assert wire.upload.shapes["dw"] == (it.w.numel() - wire.head.size,)


@pytest.mark.parametrize("net", NETS)
def test_it_is_fedavg_on_a_head_without_gradient(net):
    mine, theirs = play(settings("freeze", net, train=TRAIN)), prepare(settings("fedavg", net, train=TRAIN))
    for parameter in theirs.made.net.head.parameters():
        parameter.requires_grad_(False)
    theirs.fed.run()
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.fed.b, theirs.fed.b)


@pytest.mark.parametrize("net", NETS)
def test_equals_the_federated_phase_of_fedbabu(net):
    mine, theirs = play(settings("freeze", net, train=TRAIN)), play(settings("fedbabu", net, train=TRAIN))
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.fed.b, theirs.fed.b)
