"""FedSR (5): its objective against torch.distributions, its layers, and what stays with the client."""

import pytest
import torch
from helpers import prepare, settings
from naive import flat, module_of, rows_of
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, softplus

from fedmpi.common import seeds
from fedmpi.models.probabilistic_features import GaussianFeatures


def gaussian(inputs=6, width=5, classes=3):
    torch.manual_seed(0)
    made = GaussianFeatures(
        nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes)), classes
    ).double()
    with torch.no_grad():
        for p in (made.r_mu, made.r_sigma):
            p.add_(torch.randn_like(p))
        made.C.fill_(-1.3)  # its sign means nothing to a width
    return made


def test_features_are_draws_in_training_and_means_in_evaluation():
    made, x = gaussian(), torch.randn(1, 6, dtype=torch.float64).expand(20_000, 6)
    mu, s = made.encode(made.body(x[:1])).chunk(2, 1)
    z = made.features(x)[:, :5]
    torch.testing.assert_close(z.mean(0), mu[0], rtol=0, atol=0.05)
    torch.testing.assert_close(z.std(0), softplus(s[0]), rtol=0.03, atol=0)
    made.eval()
    torch.testing.assert_close(made.features(x[:1]), mu, rtol=0, atol=1e-14)
    torch.testing.assert_close(made(x[:1]), made.head.layer(mu))
    assert made.head.weight is made.head.layer.weight  # analyses look at it


def test_divergences_do_not_cancel_in_bf16():
    made = gaussian(width=512).float()
    mu, sigma = made.r_mu + 0.1, softplus(made.r_sigma)
    with torch.autocast("cpu", torch.bfloat16):
        found = made.kl_divergences(mu, sigma).diagonal()
    assert torch.equal(found, made.kl_divergences(mu, sigma).diagonal())
    assert (found > 0).all()


def test_the_models_own_head_is_the_classifier():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    weight = net[3].weight
    made = GaussianFeatures(net, 2)
    assert made.head.layer.weight is weight
    assert made.encode.weight.shape == (6, 3)
    alone = GaussianFeatures(nn.Linear(4, 2), 2)
    assert alone(torch.randn(5, 4)).shape == (5, 2)


@pytest.mark.parametrize("options", [{}, {"l2r": 0.0, "cmi": 0.3}, {"l2r": 0.4, "cmi": 0.0}])
def test_one_round_of_a_client_by_hand(client_of, options):
    it = prepare(settings("fedsr", options=options, train={"batch_size": "full", "epochs": 2, "weight_decay": 1e-3}))
    l2r, cmi = options.get("l2r", 0.01), options.get("cmi", 0.001)
    client, module = client_of(it, 2), module_of(it)
    x, y = rows_of(it, 2)
    sgd = torch.optim.SGD(module.parameters(), 0.05, 0.9, weight_decay=1e-3)
    with seeds.temporary_seed(0, "torch", 0, 2):
        for _ in range(2):
            mu, s = module.encode(module.body(x)).chunk(2, 1)
            z = mu + softplus(s) * torch.randn_like(mu)
            own = Normal(module.C * mu, module.C * softplus(s))
            kl = kl_divergence(own, Normal(module.r_mu[y], softplus(module.r_sigma[y]))).sum(1)
            loss = cross_entropy(module.head.layer(z), y) + l2r * z.norm(dim=1).mean() + cmi * kl.mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    with seeds.temporary_seed(0, "torch", 0, 2):
        it.experiment.method.train(client)
    torch.testing.assert_close(client.w, flat(module), rtol=0, atol=1e-5)
