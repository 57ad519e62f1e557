"""FedPara and pFedPara (4.6) in a federation: factors are averaged, W is not; W_2 stays where it is personal."""

import copy

import pytest
import torch
from helpers import play, prepare, settings
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds
from fedmpi.models.fedpara import OWN

CNN = {"train": {"weight_decay": 1e-3}, "cohort": {"fraction": 0.3}}  # 32 -> 64 maps and 256 -> 512 units shrink


def test_factors_are_averaged():
    """One round by hand: each client by plain SGD on its copy of the factorised net, then the mean of parameters."""
    it = prepare(settings("fedpara", "cnn", rounds=1, **CNN))
    data, start = it.made.data, copy.deepcopy(it.made.net.module)
    it.fed.run()
    cohort = it.rows[0]["cohort"]
    sizes = torch.tensor([float(data.train_sizes[k]) for k in cohort], dtype=torch.float64)
    mean = 0
    for k, p in zip(cohort, sizes / sizes.sum(), strict=True):
        module = copy.deepcopy(start)
        x, y = data.train[k].x[data.train[k].index], data.train[k].y[data.train[k].index]
        sgd = torch.optim.SGD(module.parameters(), 0.05, 0.9, weight_decay=1e-3)
        for rows in torch.randperm(len(x), generator=seeds.generator(0, "batches", 0, k, 0)).split(10):
            sgd.zero_grad()
            cross_entropy(module(x[rows]), y[rows]).backward()
            sgd.step()
        mean = mean + p * torch.cat([p.flatten() for p in module.state_dict().values()]).double()
    found = torch.cat([s.view(it.w).flatten() for s in it.made.model.layout.segments])
    torch.testing.assert_close(found.double(), mean, rtol=0, atol=2e-5)
    assert (found - torch.cat([p.flatten() for p in start.state_dict().values()])).abs().max() > 0.01


def test_a_net_whose_layers_would_grow_is_fedavgs():
    net = {"name": "mlp", "hidden": [4]}
    with pytest.warns(UserWarning, match="no layer"):
        mine = play(settings("fedpara", "mlp", model=net))
    assert mine.hashes == play(settings("fedavg", "mlp", model=net)).hashes


def test_personal_factors_stay(client_of):
    it = play(settings("pfedpara", "cnn", rounds=2, **CNN | {"cohort": {"fraction": 1.0}}))
    messages, layout = it.made.messages, it.made.model.layout
    own = [s for s in layout.segments if s.group == OWN]
    assert {s.name.split(".two.")[1] for s in own} == {"T", "O", "I", "X", "Y"}
    assert messages.upload(0).packing.shapes["dw"] == (layout.size - sum(s.stop - s.start for s in own),)
    used = [it.made.method.weights(client_of(it, k)).clone() for k in range(7)]
    for s in layout.segments:
        values = torch.stack([s.view(w) for w in used])
        if s in own:
            assert all((values[i] - values[j]).abs().max() > 1e-6 for i in range(7) for j in range(i)), s.name
            assert torch.equal(s.view(it.w), s.view(it.w0))
        else:
            assert all(torch.equal(value, s.view(it.w)) for value in values), s.name
            assert not torch.equal(s.view(it.w), s.view(it.w0)), s.name


def test_personal_weight_has_the_one(client_of):
    """W = W_1 . (W_2 + 1): with W_2 = 0 a client uses W_1 alone."""
    made = prepare(settings("pfedpara", "cnn")).made
    layer = made.net.module.body[3]
    with torch.no_grad():
        for factor in layer.two.parameters():
            factor.zero_()
    assert torch.equal(layer.weight(), layer.one())
