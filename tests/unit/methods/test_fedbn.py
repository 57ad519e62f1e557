"""FedBN: what normalises stays at home."""

import pytest
import torch
from helpers import play, prepare, settings
from torch import nn

from fedmpi.methods.fedbn import FedBN


def kept(it):
    """client -> (own weights, own buffers), copies"""
    return {k: (it.kept(k)._w.clone(), it.kept(k)._b.clone()) for k in it.fed.states.rows}


def test_without_batch_normalisation_it_is_fedavg():
    with pytest.warns(UserWarning, match="all of model mlp travels"):
        mine = play(settings("fedbn", "mlp"))
    assert mine.hashes == play(settings("fedavg", "mlp")).hashes


def test_the_own_part_changes_when_its_client_trains_and_at_no_other_time():
    states = [kept(play(settings("fedbn", "norm", rounds=t))) for t in (1, 2, 3)]
    it = play(settings("fedbn", "norm", rounds=3))
    initial = it.made.messages.personal.take(it.w0)
    idle = trained = 0
    for t in (1, 2):
        for k in range(7):
            w, b = states[t].get(k, (initial, None))
            before, b_before = states[t - 1].get(k, (initial, None))
            if k in it.rows[t]["cohort"]:
                trained += 1
                assert not torch.equal(w, before)
            else:
                idle += 1
                assert torch.equal(w, before)
                assert b is None or torch.equal(b, b_before)
    assert idle
    assert trained


def test_clients_share_all_but_their_normalisation(client_of):
    """After a round with all clients: own weights and statistics, one and the same model around them."""
    it = play(settings("fedbn", "norm", rounds=1, cohort={"fraction": 1.0}))
    client, other = client_of(it, 0, 1), client_of(it, 1, 1)
    for s in it.made.model.layout.segments:
        assert torch.equal(s.view(client.w0), s.view(other.w0)) == (s.group != "norm"), s.name
    assert not torch.equal(client.b0, other.b0)
    assert {s.name for s in it.made.model.layout.segments if s.group == "norm"} == {"1.weight", "1.bias"}
    moved = [s for s in it.made.model.layout.segments if s.group != "norm"]
    assert all(not torch.equal(s.view(client.w0), s.view(it.w0)) for s in moved)


def test_clients_are_evaluated_with_their_own(client_of):
    """`personal` is the model of that client: shared weights, own normalisation with own statistics."""
    it = play(settings("fedbn", "norm", rounds=2))
    for k in (0, 3):
        client = client_of(it, k, 2)
        module, shard = it.made.net.module, it.made.data.test[k]
        it.made.model.load(client.w0, client.b0)
        module.eval()
        with torch.no_grad():
            hits = (module(shard.x[shard.index]).argmax(1) == shard.y[shard.index]).double().mean()
        found = [row["accuracy"] for row in it.lines if row["client"] == k and row["round"] == 1]
        assert found == pytest.approx([100 * hits.item()])


FULL = {"batch_size": "full"}  # no batch of one, which has no variance


class Names(nn.Module):
    """As in torchvision's ResNets: normalisation with and without bn in its name; and a layer norm."""

    def __init__(self):
        super().__init__()
        self.bn1 = nn.BatchNorm1d(64)
        self.downsample = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.downsample(self.bn1(x.flatten(1)))))


def names(input_shape, classes):
    return Names()


@pytest.mark.parametrize(
    ("bn_match", "stays"),
    [
        ("type", {"bn1", "downsample.1"}),
        ("any", {"bn1", "downsample.1", "norm"}),
        ("name", {"bn1"}),
    ],
)
def test_which_layers_stay(bn_match, stays):
    config = settings("fedbn", "norm", model={"name": f"{__file__}:names"}, options={"bn_match": bn_match}, train=FULL)
    it = prepare(config)
    for layout in (it.made.model.layout, it.made.model.buffer_layout):
        own = {s.name.rsplit(".", 1)[0] for s in layout.segments if s.group not in it.made.messages.shared_groups}
        assert own == {name for name in stays if name != "norm" or layout is it.made.model.layout}
    it.fed.run()
    fedavg = play(settings("fedavg", "norm", model={"name": f"{__file__}:names"}, train=FULL))
    assert it.hashes != fedavg.hashes


def test_a_model_without_normalisation_is_told_that_this_is_fedavg():
    with pytest.warns(UserWarning, match="the model has no batch normalisation, .*: the results are those of FedAvg$"):
        FedBN().prepare(nn.Sequential(nn.Linear(2, 2)), 2)
    with pytest.warns(UserWarning, match="those of FedAvg; bn_match: any keeps its other normalisation layers"):
        FedBN().prepare(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), 2)
