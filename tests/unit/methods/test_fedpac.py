"""FedPAC: statistics, mixtures of heads and phases against naive loops."""

import copy

import numpy as np
import pytest
import torch
from helpers import play, prepare, settings
from torch.nn.functional import cross_entropy

from fedmpi.flat.packing import Views
from fedmpi.method.context import Uploads
from fedmpi.methods._prototypes import head_mixture


def rows_of(it, k):
    shard = it.made.data.train[k]
    return shard.x[shard.index], shard.y[shard.index]


def naive_statistics(z, y, classes):
    """h (c, z) and V of (1), class by class, in float64."""
    z, n = z.double(), len(y)
    h, V = torch.zeros(classes, z.shape[1], dtype=torch.float64), 0.0
    for c in range(classes):
        mine = z[y == c]
        if not len(mine):
            continue
        pi, mu = len(mine) / n, mine.mean(0)
        h[c] = pi * mu
        V += pi * sum((row @ row).item() for row in mine) / len(mine) - pi**2 * (mu @ mu).item()
    return h, V / n


def naive_delta(h, i):
    m = len(h)
    delta = np.zeros((m, m))
    for j in range(m):
        for q in range(m):
            delta[j, q] = sum((h[i][c] - h[j][c]) @ (h[i][c] - h[q][c]) for c in range(h.shape[1]))
    return delta


def uploads(h, V):
    m = len(V)
    views = Views({"h": h, "V": V})
    return Uploads(range(m), torch.ones(m), torch.full((m,), 1 / m, dtype=torch.float64), views)


def test_statistics_are_taken_with_the_received_body(trained):
    it = prepare(settings("fedpac"))
    module = copy.deepcopy(it.made.net.module)
    for k in range(7):
        x, y = rows_of(it, k)
        h, V = naive_statistics(module.features(x).detach(), y, 4)
        client, up = trained(it, k)
        torch.testing.assert_close(up.h.double(), h, rtol=0, atol=1e-6)
        assert up.V.item() == pytest.approx(V, rel=1e-5)
        # prototypes after training, with the trained body
        it.made.model.load(client.w)
        z = it.made.net.module.features(x).detach()
        for c in range(4):
            expected = z[y == c].mean(0) if (y == c).any() else torch.zeros(16)
            torch.testing.assert_close(up.protos[c], expected, rtol=0, atol=1e-5)
        assert up.counts.tolist() == it.made.data.label_counts[k].tolist()


@pytest.mark.parametrize("m", [2, 3, 6])
def test_mixture_minimises_its_quadratic_form(m):
    """Against (4) written as loops: Delta^i has a zero i-th row and column, and no small shift of weight from a used
    head to any other lowers a' P a. Entries of at most 1e-3 are cut, which costs up to about that much."""
    g = torch.Generator().manual_seed(m)
    h = torch.randn(m, 3, 4, generator=g, dtype=torch.float64)
    V = 5 * torch.rand(m, generator=g, dtype=torch.float64) + 2
    for i in range(m):
        delta = naive_delta(h.numpy(), i)
        assert not delta[i].any()
        assert not delta[:, i].any()
        P = np.diag(V.numpy()) + delta
        a = head_mixture(h, V, i).numpy()
        assert a.sum() == pytest.approx(1, abs=1e-12)
        assert a.min() >= 0
        assert not ((a > 0) & (a <= 1e-3)).any()
        slope = 2 * P @ a
        used = a > 0
        assert np.ptp(slope[used]) <= 1e-2 * abs(slope).max()
        assert slope.min() >= slope[used].max() * (1 - 1e-2)
    assert (head_mixture(h, V, 0) - 1 / m).abs().max() > 0.01


def test_two_clients_by_hand():
    """h_0 - h_1 = (sqrt .5), V = (1, .5):  P^0 = diag(1, .5) + [[0, 0], [0, .5]] = I, so a_0 = (1/2, 1/2);
    P^1 = diag(1.5, .5), so a_1 is proportional to (1/1.5, 1/.5) = (1/4, 3/4)."""
    h = torch.zeros(2, 1, 1, dtype=torch.float64)
    h[1] = 0.5**0.5
    up = uploads(h, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert head_mixture(up.h, up.V, 0).tolist() == pytest.approx([0.5, 0.5])
    assert head_mixture(up.h, up.V, 1).tolist() == pytest.approx([0.25, 0.75])


def test_identical_clients_mix_uniformly():
    """Delta = 0 and equal V: a' a is least at 1/m."""
    up = uploads(torch.ones(5, 2, 3), torch.full((5,), 0.3))
    assert head_mixture(up.h, up.V, 2).tolist() == pytest.approx([0.2] * 5)


def test_small_entries_are_cut():
    """V = (1, 2000): a = (2000, 1) / 2001, and 1/2001 < 1e-3."""
    up = uploads(torch.zeros(2, 1, 1), torch.tensor([1.0, 2000.0]))
    assert head_mixture(up.h, up.V, 0).tolist() == [1.0, 0.0]
    up = uploads(torch.zeros(2, 1, 1), torch.tensor([1.0, 900.0]))  # 1/901 > 1e-3
    assert head_mixture(up.h, up.V, 0).tolist() == pytest.approx([900 / 901, 1 / 901])


def test_a_round_of_the_server():
    """Prototypes by counts, a mixture for who took part, the old head for who did not."""
    it = play(settings("fedpac", rounds=1))
    up, members = it.uploads, it.rows[0]["cohort"]
    assert 1 < len(members) < 7
    state = it.fed.server.state
    for c in range(4):
        total = up.counts[:, c].sum()
        expected = sum(up.counts[i, c] * up.protos[i, c] for i in range(len(members))) / total
        torch.testing.assert_close(state.protos[c], expected, rtol=0, atol=1e-5)
    first = it.made.messages.head.take(it.w0)
    for k in set(range(7)) - set(members):
        assert torch.equal(state.heads[k], first)
    gathered = uploads(up.h, up.V)
    for i, k in enumerate(members):
        a = head_mixture(gathered.h, gathered.V, i)
        expected = sum(a[j] * up.head[j].double() for j in range(len(members)))
        torch.testing.assert_close(state.heads[k].double(), expected, rtol=0, atol=1e-6)
        assert (state.heads[k] - up.head[i]).abs().max() > 1e-4


def test_one_step_of_the_body_against_autograd(client_of):
    """(2) with the class prototypes of the server, and of the client itself where the server has none."""
    it = prepare(
        settings("fedpac", options={"lam": 0.7, "head_epochs": 0}, train={"batch_size": "full", "momentum": 0.0})
    )
    known = torch.tensor([0.0, 1.0, 1.0, 0.0])
    protos = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * known[:, None]
    it.fed.server.state.protos.copy_(protos)
    it.fed.server.state.known.copy_(known)
    module = copy.deepcopy(it.made.net.module)
    client = client_of(it, 0, round_=1)
    x, y = rows_of(it, 0)
    assert set(y.tolist()) & {0, 3}, "or no class falls back on the client's own"
    z = module.features(x)
    means = {c: z[y == c].mean(0).detach() for c in set(y.tolist())}
    targets = torch.stack([protos[c] if known[c] else means[c] for c in y.tolist()])
    (cross_entropy(module.head(z), y) + 0.7 * (z - targets).square().mean()).backward()
    it.made.method.train(client)
    g = torch.cat([p.grad.flatten() for n, p in module.named_parameters() if not n.startswith("head")])
    body = it.made.messages.shared
    torch.testing.assert_close((body.take(client.w0) - body.take(client.w)) / 0.05, g, rtol=0, atol=1e-5)


def test_one_step_of_the_head_at_its_own_rate(client_of):
    """The rate of the head phase is head_lr in every round, whatever train.lr has fallen to; the body stays."""
    train = {"batch_size": "full", "momentum": 0.0, "epochs": 0, "schedule": "exponential", "decay": 0.1}
    it = prepare(settings("fedpac", options={"head_lr": 0.3}, train=train))
    module = copy.deepcopy(it.made.net.module)
    client = client_of(it, 0, round_=2)
    x, y = rows_of(it, 0)
    cross_entropy(module(x), y).backward()
    it.made.method.train(client)
    head, body = it.made.messages.head, it.made.messages.shared
    g = torch.cat([module.head.weight.grad.flatten(), module.head.bias.grad])
    torch.testing.assert_close((head.take(client.w0) - head.take(client.w)) / 0.3, g, rtol=0, atol=1e-5)
    assert torch.equal(body.take(client.w), body.take(client.w0))
