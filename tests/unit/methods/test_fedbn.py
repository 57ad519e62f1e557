"""FedBN: what normalises stays at home."""

from itertools import pairwise

import pytest
import torch
from helpers import play, settings
from naive import assert_is_fedavg, assert_own_parts, loss_of, module_of, rows_of
from torch import nn

from fedmpi.methods.fedbn import FedBN


def own_parts(it, k):
    """Client k's own weights and buffers, the initial ones before its first round."""
    if k in it.fed.states.rows:
        return it.kept(k)._w, it.kept(k)._b
    return it.made.messages.personal.take(it.w0), None


def test_without_batch_normalisation_it_is_fedavg():
    with pytest.warns(UserWarning, match="all of model mlp travels"):
        assert_is_fedavg("fedbn")


def test_the_own_part_changes_when_its_client_trains_and_at_no_other_time():
    runs = [play(settings("fedbn", "norm", rounds=t)) for t in (1, 2, 3)]
    for before, it in pairwise(runs):
        cohort = it.rows[-1]["cohort"]
        assert 0 < len(cohort) < 7
        for k in range(7):
            (w_before, b_before), (w, b) = own_parts(before, k), own_parts(it, k)
            assert torch.equal(w, w_before) == (k not in cohort)
            if k not in cohort and b is not None:
                assert torch.equal(b, b_before)


def test_clients_share_all_but_their_normalisation(client_of):
    """After a round with all clients: own weights and statistics, one and the same model around them."""
    it = play(settings("fedbn", "norm", rounds=1, cohort={"fraction": 1.0}))
    assert_own_parts(it, client_of, {"1.weight", "1.bias"})
    assert not torch.equal(*(own_parts(it, k)[1] for k in (0, 1)))


def test_clients_are_evaluated_with_their_own(client_of):
    """`personal` is the model of that client: shared weights, own normalisation with own statistics."""
    it = play(settings("fedbn", "norm", rounds=2))
    losses = {line["client"]: line["loss"] for line in it.lines if line["round"] == 1}
    for k in (0, 3):
        client = client_of(it, k, 2)
        loss = loss_of(module_of(it, client.w0, client.b0), rows_of(it, k, "test"))
        assert losses[k] == pytest.approx(loss, rel=1e-5)


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
    [("type", {"bn1", "downsample.1"}), ("any", {"bn1", "downsample.1", "norm"}), ("name", {"bn1"})],
)
def test_which_layers_stay(bn_match, stays):
    net = {"model": {"name": f"{__file__}:names"}, "train": {"batch_size": "full"}}  # a batch of one has no variance
    it = play(settings("fedbn", "norm", options={"bn_match": bn_match}, **net))
    for layout in (it.made.model.layout, it.made.model.buffer_layout):
        own = {s.name.rsplit(".", 1)[0] for s in layout.segments if s.group not in it.made.messages.shared_groups}
        assert own == {name for name in stays if name != "norm" or layout is it.made.model.layout}
    assert it.hashes != play(settings("fedavg", "norm", **net)).hashes


def test_a_model_without_normalisation_is_told_that_this_is_fedavg():
    with pytest.warns(UserWarning, match="the model has no batch normalisation, .*: the results are those of FedAvg$"):
        FedBN().prepare(nn.Sequential(nn.Linear(2, 2)), 2)
    with pytest.warns(UserWarning, match="those of FedAvg; bn_match: any keeps its other normalisation layers"):
        FedBN().prepare(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), 2)
