"""MOON: towards the received model's features, away from one's own last ones."""

import copy

import pytest
import torch
from helpers import play, settings
from naive import assert_same, descend, experiment, features, gradient, rows_of
from torch.nn.functional import cosine_similarity, cross_entropy

from fedmpi.methods.moon import contrastive

Z = torch.tensor([[1.0, 0], [1, 1]], dtype=torch.float64)  # numbers below: computed in numpy, float64
NEAR = torch.tensor([[1.0, 1], [1, 0]], dtype=torch.float64)
FAR = torch.tensor([[0.0, 1], [1, 1]], dtype=torch.float64)


@pytest.mark.parametrize(("tau", "value"), [(0.5, 0.6229779), (1.0, 0.6255563)])
def test_mlp_backward(tau, value):
    assert contrastive(Z, NEAR, FAR, tau).item() == pytest.approx(value, abs=5e-8)


@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_the_first_round_is_fedavg_bit_for_bit(net):
    """The last model is the initial one, as is the received: exact zeros are added to the gradient."""
    mine, theirs = (play(settings(name, net, rounds=4)) for name in ("moon", "fedavg"))
    assert mine.hashes[0] == theirs.hashes[0]
    assert mine.hashes[3] != theirs.hashes[3]


def test_the_last_model_is_what_was_sent():
    """Weights and batch statistics of the client's last round; the initial ones before that."""
    it = play(settings("moon", "norm", rounds=1))
    rows, members = it.uploads, it.rows[0]["cohort"]
    messages, start = it.made.messages, it.fed.states
    assert 0 < len(members) < 7
    for k in range(7):
        row = start.rows[k] if k in start.rows else messages.initial_state("client_state", start.w0, start.b0)
        kept = messages.client_state.views(row)
        if k in members:
            i = members.index(k)
            torch.testing.assert_close(kept.last, start.w0 + rows.dw[i], rtol=0, atol=1e-6)
            assert torch.equal(kept.last_b, rows._b[i])
            assert not torch.equal(kept.last_b, start.b0)
        else:
            assert torch.equal(kept.last, start.w0)
            assert torch.equal(kept.last_b, start.b0)


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 1.0)])
def test_five_steps_against_the_formula(client, mu, tau):
    """Another last model with statistics of its own; both anchors in evaluation mode."""
    it = experiment("moon", {"mu": mu, "tau": tau})
    x, y = rows_of(it)
    module = copy.deepcopy(it.made.net.module)
    received = copy.deepcopy(module).eval()
    k = client(it)
    g = torch.Generator().manual_seed(0)
    k.state.last.add_(0.1 * torch.randn(k.w.shape, generator=g, dtype=torch.float64))
    k.state.last_b.copy_(torch.rand(k.b0.shape, generator=g, dtype=torch.float64) + 0.5)
    last = copy.deepcopy(module)
    last.load_state_dict(it.made.model.state_dict(k.state.last, k.state.last_b))
    last.eval()

    def direction():
        z, f = features(module, x)
        near = cosine_similarity(z, features(received, x)[0].detach(), dim=1) / tau
        far = cosine_similarity(z, features(last, x)[0].detach(), dim=1) / tau
        first = torch.zeros(len(y), dtype=torch.int64)
        return gradient(module, cross_entropy(f, y) + mu * cross_entropy(torch.stack([near, far], 1), first))

    descend(module, 5, direction)
    it.made.method.train(k)
    assert_same(it, module)
