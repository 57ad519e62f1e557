"""FedRep: which weights move in which phase, and what is left without the first."""

import torch
from helpers import federated, play, prepare, settings

TRAIN = {"momentum": 0.9, "weight_decay": 1e-2}  # either would move weights that a careless optimiser still holds


def test_phases_in_their_order(client_of):
    """Head first: the two phases one after the other are the method's `train`."""
    it = prepare(settings("fedrep", options={"head_epochs": 2, "body_epochs": 1}, train=TRAIN))
    it.made.method.train(client_of(it))
    whole = it.made.model.w.clone()
    client = client_of(it)
    client.fit(2, groups=("head",))
    middle = client.w.clone()
    client.fit(1, groups=("body",))
    assert torch.equal(client.w, whole)
    assert not torch.equal(middle, whole)


def test_without_a_head_phase_it_is_fedavg_with_a_frozen_head():
    """Full batches: no order enters, the head stays the initial one everywhere."""
    train = {"batch_size": "full", **TRAIN}
    mine = play(settings("fedrep", options={"head_epochs": 0, "body_epochs": 3}, train=train))
    theirs = prepare(settings("fedavg", train={**train, "epochs": 3}))
    for parameter in theirs.made.net.head.parameters():
        parameter.requires_grad_(False)
    theirs.fed.run()
    assert mine.hashes == theirs.hashes
    assert not torch.equal(mine.w, mine.w0)


def test_heads_stay_with_their_clients():
    """What is evaluated for a client is the common body with its own head; the head never travels."""
    it = play(settings("fedrep", cohort={"fraction": 1.0}), federated())
    head = it.made.messages.head
    heads = torch.stack([it.kept(k)._w for k in range(7)])
    assert heads.shape == (7, head.size)
    assert torch.cdist(heads, heads).fill_diagonal_(1).min() > 1e-3
    assert it.uploads.dw.shape == (7, it.w.numel() - head.size)
    assert torch.equal(head.take(it.w), head.take(it.w0))
