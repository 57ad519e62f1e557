"""Ditto: a personal model beside FedAvg's, whose equality with FedAvg the battery of all methods tests."""

import pytest
from helpers import prepare

from fedmpi.runtime import build_data


def test_one_step_of_the_personal_model(quadratic, client_of):
    """a = 3, b = 4, v = 2, w_g = 1, eta = .05, lam = .75:  2 - .05 (3 (2 - 4) + .75 (2 - 1)) = 2.2625.

    The global model makes its own step before, 1 - .05 * 3 (1 - 4) = 1.45; a pull towards that would give 2.279375.
    """
    config = quadratic("ditto", {"a": [[3.0]], "b": [[4.0]], "copies": [1]}, options={"lam": 0.75}, train={"epochs": 1})
    it = prepare(config, build_data.partitioned(config))
    client = client_of(it)
    client.state.v.fill_(2.0)
    state = it.made.method.train(client)
    assert client.w.item() == pytest.approx(1.45, abs=1e-12)
    assert state["v"].item() == pytest.approx(2.2625, abs=1e-12)
