"""LG-FedAvg (4.4): bodies of the clients' own under common last layers."""

import pytest
import torch
from helpers import play, prepare, settings

from fedmpi.common.errors import UserError


@pytest.mark.parametrize(("n_shared", "common"), [(1, ["head"]), (2, ["body.7", "head"])])
def test_the_last_layers_are_common_and_the_others_the_clients_own(client_of, n_shared, common):
    it = play(settings("lg_fedavg", "cnn", options={"n_shared": n_shared}, cohort={"fraction": 1.0}, rounds=2))
    used = [it.made.method.weights(client_of(it, k)).clone() for k in range(7)]
    for s in it.made.model.layout.segments:
        values = torch.stack([s.view(w) for w in used])
        if s.name.rpartition(".")[0] in common:
            assert all(torch.equal(value, s.view(it.w)) for value in values), s.name
            assert not torch.equal(s.view(it.w), s.view(it.w0))
        else:
            assert all((values[i] - values[j]).abs().max() > 1e-6 for i in range(7) for j in range(i)), s.name
            assert torch.equal(s.view(it.w), s.view(it.w0))
    sizes = {"head": 512 * 4 + 4, "body.7": 256 * 512 + 512}
    assert it.uploads.dw.shape[1:] == (sum(sizes[name] for name in common),)


def test_training_is_joint():
    """The common layers of round 0 are FedAvg's."""
    config = {"rounds": 1, "cohort": {"fraction": 1.0, "weighting": "uniform"}}
    mine, theirs = play(settings("lg_fedavg", "norm", **config)), play(settings("fedavg", "norm", **config))
    assert torch.equal(mine.made.messages.shared.take(mine.w), mine.made.messages.shared.take(theirs.w))


def test_more_layers_than_there_are():
    with pytest.raises(UserError, match="n_shared is 3, but the model has 2 linear"):
        prepare(settings("lg_fedavg", options={"n_shared": 3}))
