"""LG-FedAvg (4.4): bodies of the clients' own under common last layers."""

import pytest
import torch
from helpers import play, prepare, settings
from naive import assert_own_parts

from fedmpi.common.errors import UserError


@pytest.mark.parametrize(("n_shared", "common"), [(1, ["head"]), (2, ["body.7", "head"])])
def test_the_last_layers_are_common_and_the_others_the_clients_own(client_of, n_shared, common):
    it = play(settings("lg_fedavg", "cnn", options={"n_shared": n_shared}, cohort={"fraction": 1.0}, rounds=2))
    own = {s.name for s in it.made.model.layout.segments if s.name.rpartition(".")[0] not in common}
    assert_own_parts(it, client_of, own)
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
