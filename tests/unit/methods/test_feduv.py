"""FedUV: features spread, probabilities vary."""

import pytest
import torch
from naive import assert_trains_along, experiment, features, gradient
from torch.nn.functional import cross_entropy, softmax

from fedmpi.methods.feduv import uniformity, variance

Z = torch.tensor([[0.0, 0], [1, 0], [0, 2]], dtype=torch.float64)  # d = 1, 4, 5
F = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 0, 3]], dtype=torch.float64)  # (c)


def test_uniformity_by_hand():
    """sigma = 4: (e^-1/4 + e^-1 + e^-5/4) / 3."""
    assert uniformity(Z).item() == pytest.approx(0.4777283, abs=5e-8)


def test_variance_by_hand():
    one_hot = torch.eye(4, dtype=torch.float64)
    assert variance(F.softmax(1)).item() == pytest.approx(0.2053841, abs=5e-8)
    assert variance(one_hot).item() == pytest.approx(0, abs=1e-12)
    assert variance(one_hot.repeat(2, 1), "none").item() == pytest.approx(0.5 - (1.5 / 7) ** 0.5, abs=1e-12)


def test_the_variants_of_table_6():
    """More spread than c0 = 1 / sqrt 2: the hinge stops at 0, the others count it. s = sqrt 2 and 0."""
    P, c0 = torch.tensor([[2.0, 0.5], [0, 0.5]], dtype=torch.float64), 0.5**0.5
    assert variance(P).item() == pytest.approx((0 + c0) / 2, abs=1e-12)
    assert variance(P, "none").item() == pytest.approx((c0 - 2**0.5 + c0) / 2, abs=1e-12)
    assert variance(P, "squared").item() == pytest.approx(((c0 - 2**0.5) ** 2 + c0**2) / 2, abs=1e-12)


def test_coinciding_features():
    """Zero distances count 1 each and do not enter sigma; all of them zero: 1; a batch of one: 0. No nan."""
    twice = torch.cat([Z, Z[:1]])  # d = 1, 4, 0, 5, 1, 4: sigma = the lower of 1, 1, 4, 4, 5's middle, 4
    e = torch.tensor([1.0, 4, 0, 5, 1, 4], dtype=torch.float64)
    assert uniformity(twice).item() == pytest.approx((-e / 4).exp().mean().item(), abs=1e-12)
    z = twice.clone().requires_grad_()
    (g,) = torch.autograd.grad(uniformity(z), z)
    assert g.isfinite().all()
    assert uniformity(Z[:1].expand(4, 2)).item() == 1
    assert (uniformity(Z[:1]).item(), variance(F[:1].softmax(1)).item()) == (0, 0)


def test_the_gradient_goes_through_sigma():
    """U does not change with scale, so its gradient has no part along z; with sigma held it has."""
    z = Z.clone().requires_grad_()
    along = [(torch.autograd.grad(uniformity(z, held), z)[0] * z).sum().item() for held in (False, True)]
    assert along[0] == pytest.approx(0, abs=1e-12)
    assert along[1] < -0.1


@pytest.mark.parametrize(("options", "lam"), [({}, 1.0), ({"mu": 1.0, "lam": 2.5}, 2.5)])
def test_five_steps_against_the_formula(client_of, options, lam):
    """lam is a quarter of the four classes where it is not given."""
    it = experiment("feduv", options)

    def direction(module, received, x, y):
        z, f = features(module, x)
        n = len(y)
        d = torch.stack([(z[i] - z[j]).square().sum() for i in range(n) for j in range(i + 1, n)])
        U = (-d / d[d > 0].median()).exp().mean()
        P = softmax(f, 1)
        s = ((P - P.mean(0)).square().sum(0) / (n - 1)).sqrt()
        V = torch.relu(0.5 - s).mean()
        return gradient(module, cross_entropy(f, y) + options.get("mu", 0.5) * U + lam * V)

    assert_trains_along(it, client_of(it), direction)
