"""A client's own model is judged with batch statistics of its own passes, not with those of everybody's model."""

import copy

import pytest
import torch
from helpers import federated, play, prepare, settings
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from fedmpi.common import seeds

LR, DECAY = 0.05, 1e-3
FIT = {"ditto": 1, "apfl": 0}  # which `fit` of a client's round draws the batches: Ditto's own model is trained second


def alone(config, it, data):
    """{client: module} of clients who train alone, in the rounds in which they take part."""
    modules = {k: copy.deepcopy(it.made.net.module) for k in data.train}
    it.fed.run()
    for row in it.rows:
        for k in row["cohort"]:
            modules[k].train()
            for module in modules[k].modules():
                if hasattr(module, "reset_running_stats") and module.momentum is None:
                    module.num_batches_tracked.zero_()  # an average over this round's batches
            x, y = data.train[k].x[data.train[k].index], data.train[k].y[data.train[k].index]
            generator = seeds.generator(config.seed, "batches", row["round"], k, FIT[config.method.name])
            for rows in torch.randperm(len(x), generator=generator).split(10):
                modules[k].zero_grad()
                cross_entropy(modules[k](x[rows]), y[rows]).backward()
                with torch.no_grad():
                    for p in modules[k].parameters():
                        p -= LR * p.grad
    return modules


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("method", "options"), [("ditto", {"lam": 0.0}), ("apfl", {"alpha": 1.0, "adapt": "never"})], ids=["ditto", "apfl"]
)
def test_without_the_others_it_is_local_training(method, options, momentum):
    config = settings(
        method,
        options=options,
        rounds=4,
        train={"epochs": 1, "lr": LR, "momentum": 0.0, "weight_decay": 0.0},
        model={"name": "nets:norm64", "momentum": momentum},
        evaluate={"protocol": ["personal"]},
    )
    data = federated()
    it = prepare(config, data)
    modules = alone(config, it, data)
    found = {line["client"]: line["loss"] for line in it.lines if line["round"] == 3}
    trained = {k for row in it.rows for k in row["cohort"]}
    assert len(trained) >= 5
    for k in trained:
        torch.testing.assert_close(it.kept(k).v, parameters_to_vector(modules[k].parameters()).detach())
        test = data.test[k]
        with torch.no_grad():
            own = cross_entropy(modules[k].eval()(test.x[test.index]), test.y[test.index]).item()
        assert found[k] == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("head", ["global", "local"])
def test_fedatoms_own_atoms_have_theirs(head):
    config = settings(
        "fedatom_personal",
        options={"atoms": 3, "pers_head": head},
        rounds=1,
        model={"name": "nets:norm64"},
        evaluate={"protocol": ["personal"]},
    )
    it = play(config)
    for k in it.rows[0]["cohort"]:
        assert not torch.equal(it.kept(k).own_b, it.b)
