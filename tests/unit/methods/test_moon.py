"""MOON: towards the received model's features, away from one's own last ones."""

import pytest
import torch
from helpers import play, settings
from naive import assert_trains_along, experiment, features, gradient, module_of
from torch.nn.functional import cosine_similarity, cross_entropy

from fedmpi.methods.moon import contrastive

Z = torch.tensor([[1.0, 0], [1, 1]], dtype=torch.float64)  # numbers below: computed in numpy, float64
NEAR = torch.tensor([[1.0, 1], [1, 0]], dtype=torch.float64)
FAR = torch.tensor([[0.0, 1], [1, 1]], dtype=torch.float64)


@pytest.mark.parametrize(("tau", "value"), [(0.5, 0.6229779), (1.0, 0.6255563)])
def test_by_hand(tau, value):
    assert contrastive(Z, NEAR, FAR, tau).item() == pytest.approx(value, abs=5e-8)


@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_the_first_round_is_fedavg_bit_for_bit(net):
    """The last model is the initial one, as is the received: exact zeros are added to the gradient."""
    mine, theirs = (play(settings(name, net, rounds=4)) for name in ("moon", "fedavg"))
    assert mine.hashes[0] == theirs.hashes[0]
    assert mine.hashes[3] != theirs.hashes[3]


def test_the_last_model_is_what_was_sent(client_of):
    """Weights and batch statistics of the client's last round; the initial ones before that."""
    it = play(settings("moon", "norm", rounds=1))
    cohort = it.rows[0]["cohort"]
    assert 0 < len(cohort) < 7
    for k in range(7):
        state = client_of(it, k).state
        if k in cohort:
            i = cohort.index(k)
            torch.testing.assert_close(state.last, it.w0 + it.uploads.dw[i], rtol=0, atol=1e-6)
            assert torch.equal(state.last_b, it.uploads._b[i])
            assert not torch.equal(state.last_b, it.b0)
        else:
            assert torch.equal(state.last, it.w0)
            assert torch.equal(state.last_b, it.b0)


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 1.0)])
def test_five_steps_against_the_formula(client_of, mu, tau):
    """Another last model with statistics of its own; both anchors in evaluation mode."""
    it = experiment("moon", {"mu": mu, "tau": tau})
    client = client_of(it)
    g = torch.Generator().manual_seed(0)
    client.state.last.add_(0.1 * torch.randn(client.w.shape, generator=g, dtype=torch.float64))
    client.state.last_b.copy_(torch.rand(client.b0.shape, generator=g, dtype=torch.float64) + 0.5)
    last = module_of(it, client.state.last, client.state.last_b).eval()

    def direction(module, received, x, y):
        z, f = features(module, x)
        near = cosine_similarity(z, features(received, x)[0], dim=1) / tau
        far = cosine_similarity(z, features(last, x)[0].detach(), dim=1) / tau
        first = torch.zeros(len(y), dtype=torch.int64)
        return gradient(module, cross_entropy(f, y) + mu * cross_entropy(torch.stack([near, far], 1), first))

    assert_trains_along(it, client, direction)
