"""FedPAC: statistics, mixtures of heads and phases against naive loops."""

import pytest
import torch
from helpers import play, prepare, settings
from naive import gradient, module_of, rows_of
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from fedmpi.methods._prototypes import head_mixture


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


def test_statistics_are_taken_with_the_received_body(trained):
    it = prepare(settings("fedpac"))
    received = module_of(it)
    for k in range(7):
        x, y = rows_of(it, k)
        h, V = naive_statistics(received.features(x).detach(), y, 4)
        client, sent = trained(it, k)
        torch.testing.assert_close(sent.h.double(), h, rtol=0, atol=1e-6)
        assert sent.V.item() == pytest.approx(V, rel=1e-5)
        # prototypes after training, with the trained body
        z = module_of(it, client.w).features(x).detach()
        for c in range(4):
            expected = z[y == c].mean(0) if (y == c).any() else torch.zeros(16)
            torch.testing.assert_close(sent.protos[c], expected, rtol=0, atol=1e-5)
        assert sent.counts.tolist() == it.made.data.label_counts[k].tolist()


@pytest.mark.parametrize(
    ("h", "V", "client", "mixture"),
    [
        # h_0 - h_1 = (sqrt .5), V = (1, .5):  P^0 = diag(1, .5) + [[0, 0], [0, .5]] = I, so a_0 = (1/2, 1/2);
        # P^1 = diag(1.5, .5), so a_1 is proportional to (1/1.5, 1/.5) = (1/4, 3/4)
        ([0, 0.5**0.5], [1, 0.5], 0, [0.5, 0.5]),
        ([0, 0.5**0.5], [1, 0.5], 1, [0.25, 0.75]),
        ([0, 0], [1, 2000], 0, [1, 0]),  # a = (2000, 1) / 2001, and 1/2001 < 1e-3 is cut
        ([0, 0], [1, 900], 0, [900 / 901, 1 / 901]),
    ],
)
def test_mixtures_by_hand(h, V, client, mixture):
    h, V = (torch.tensor(values, dtype=torch.float64) for values in (h, V))
    assert head_mixture(h[:, None, None], V, client).tolist() == pytest.approx(mixture)


def test_a_round_of_the_server():
    """Prototypes by counts, a mixture for who took part, the old head for who did not."""
    it = play(settings("fedpac", rounds=1))
    sent, cohort, state = it.uploads, it.rows[0]["cohort"], it.fed.server.state
    assert 1 < len(cohort) < 7
    means = (sent.counts[:, :, None] * sent.protos).sum(0) / sent.counts.sum(0)[:, None]
    torch.testing.assert_close(state.protos, means, rtol=0, atol=1e-5)
    for k in range(7):
        if k in cohort:
            i = cohort.index(k)
            expected = head_mixture(sent.h, sent.V, i).double() @ sent.head.double()
            torch.testing.assert_close(state.heads[k].double(), expected, rtol=0, atol=1e-6)
            assert (state.heads[k] - sent.head[i]).abs().max() > 1e-4
        else:
            assert torch.equal(state.heads[k], it.made.messages.head.take(it.w0))


def test_one_step_of_the_body_against_autograd(client_of):
    """(2) with the class prototypes of the server, and of the client itself where the server has none."""
    options = {"lam": 0.7, "head_epochs": 0}
    it = prepare(settings("fedpac", options=options, train={"batch_size": "full", "momentum": 0.0}))
    known = torch.tensor([0.0, 1.0, 1.0, 0.0])
    protos = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * known[:, None]
    it.fed.server.state.protos.copy_(protos)
    it.fed.server.state.known.copy_(known)
    module, client = module_of(it), client_of(it, 0, round_=1)
    x, y = rows_of(it)
    assert set(y.tolist()) & {0, 3}, "or no class falls back on the client's own"
    z = module.features(x)
    means = {c: z[y == c].mean(0).detach() for c in set(y.tolist())}
    targets = torch.stack([protos[c] if known[c] else means[c] for c in y.tolist()])
    g = parameters_to_vector(gradient(module, cross_entropy(module.head(z), y) + 0.7 * (z - targets).square().mean()))
    it.made.method.train(client)
    body = it.made.messages.shared
    torch.testing.assert_close(body.take(client.w0 - client.w) / 0.05, body.take(g), rtol=0, atol=1e-5)


def test_one_step_of_the_head_at_its_own_rate(client_of):
    """The rate of the head phase is head_lr in every round, whatever train.lr has fallen to; the body stays."""
    train = {"batch_size": "full", "momentum": 0.0, "epochs": 0, "schedule": "exponential", "decay": 0.1}
    it = prepare(settings("fedpac", options={"head_lr": 0.3}, train=train))
    module, client = module_of(it), client_of(it, 0, round_=2)
    x, y = rows_of(it)
    g = parameters_to_vector(gradient(module, cross_entropy(module(x), y)))
    it.made.method.train(client)
    head, body = it.made.messages.head, it.made.messages.shared
    torch.testing.assert_close(head.take(client.w0 - client.w) / 0.3, head.take(g), rtol=0, atol=1e-5)
    assert torch.equal(body.take(client.w), body.take(client.w0))
