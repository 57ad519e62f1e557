"""Ditto: a personal model beside FedAvg's."""

import copy

import pytest
import torch
from helpers import federated, play, prepare, settings
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds
from fedmpi.runtime import build_data


def test_one_step_of_the_personal_model(quadratic, client):
    """a = 3, b = 4, v = 2, w_g = 1, eta = .05, lam = .75:  2 - .05 (3 (2 - 4) + .75 (2 - 1)) = 2.2625.

    The global model makes its own step before, 1 - .05 * 3 (1 - 4) = 1.45; a pull towards that would give 2.279375.
    """

    config = quadratic("ditto", {"a": [[3.0]], "b": [[4.0]], "copies": [1]}, options={"lam": 0.75}, train={"epochs": 1})
    it = prepare(config, build_data.partitioned(config))
    k = client(it)
    k.state.v.fill_(2.0)
    state = it.made.method.train(k)
    assert k.w.item() == pytest.approx(1.45, abs=1e-12)
    assert state["v"].item() == pytest.approx(2.2625, abs=1e-12)


@pytest.mark.parametrize("net", ["norm", "cnn"])
def test_the_global_model_is_fedavg_bit_for_bit(net):
    """Though a second model is trained in between, with the same buffers, dropout and optimiser."""
    mine, theirs = play(settings("ditto", net)), play(settings("fedavg", net))
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.b, theirs.b)


def test_without_a_pull_v_is_local_training():
    """lam = 0: each client trains alone, in the rounds in which it takes part, with its optimiser fresh each round."""
    config = settings("ditto", options={"lam": 0.0}, rounds=4, train={"epochs": 2, "weight_decay": 1e-3})
    data = federated()
    it = prepare(config, data)
    modules = {k: copy.deepcopy(it.made.net.module) for k in range(7)}
    it.fed.run()
    for row in it.rows:
        for k in row["cohort"]:
            x, y = data.train[k].x[data.train[k].index], data.train[k].y[data.train[k].index]
            sgd = torch.optim.SGD(modules[k].parameters(), 0.05, 0.9, weight_decay=1e-3)
            # the personal pass is the second `fit` of a client's round
            generator = seeds.generator(config.seed, "batches", row["round"], k, 1)
            for _ in range(2):
                for rows in torch.randperm(len(x), generator=generator).split(10):
                    sgd.zero_grad()
                    cross_entropy(modules[k](x[rows]), y[rows]).backward()
                    sgd.step()
    assert len({k for row in it.rows for k in row["cohort"]}) >= 5
    for k in it.fed.states.rows:
        w = torch.nn.utils.parameters_to_vector(modules[k].parameters())
        torch.testing.assert_close(it.kept(k).v, w.detach(), rtol=0, atol=1e-6)
