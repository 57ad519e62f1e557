"""FedPer (4.2): FedAvg where all clients are the same; else a common body under heads of the clients' own."""

from dataclasses import replace

import torch
from helpers import images, play, settings

from fedmpi.data.batches import Shard
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split


def test_identical_clients_have_one_head_and_make_fedavg():
    """Three clients with the same ten samples, full batches: heads equal, and model of FedAvg but for the rounding of
    w + (w' - w), which FedPer's heads are spared."""
    data, rows = images(), torch.arange(10).repeat(3)
    same = Dataset(data.train_x[rows], data.train_y[rows], data.test_x, data.test_y, data.classes)
    counted = split(same, "iid", 3, 0, "global")
    counted = replace(counted, train={k: Shard(same.train_x, same.train_y, torch.arange(10)) for k in range(3)})
    config = {"train": {"batch_size": "full", "weight_decay": 1e-2}, "cohort": {"fraction": 1.0}}
    mine, theirs = play(settings("fedper", **config), counted), play(settings("fedavg", **config), counted)
    head, shared = mine.made.messages.head, mine.made.messages.shared
    heads = [mine.kept(k)._w for k in sorted(mine.fed.states.rows)]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2])
    torch.testing.assert_close(heads[0], head.take(theirs.w), rtol=0, atol=1e-6)
    torch.testing.assert_close(shared.take(mine.w), shared.take(theirs.w), rtol=0, atol=1e-6)
    assert (heads[0] - head.take(mine.w0)).abs().max() > 1e-3


def test_an_unsampled_client_has_the_new_body_and_its_old_head(client_of):
    it = play(settings("fedper"))
    messages = it.made.messages
    absent = it.fed.states.rows.keys() - set(it.rows[-1]["cohort"])
    assert any(k in row["cohort"] for row in it.rows for k in absent), "or no head is old"
    for k in absent:
        used = it.made.method.weights(client_of(it, k))
        assert torch.equal(messages.shared.take(used), messages.shared.take(it.w))
        assert torch.equal(messages.head.take(used), it.kept(k)._w)
