"""Local steps against the formulas of the papers: one client, full batches, momentum and weight decay, in float64."""

import pytest
import torch
from naive import assert_trains_along, descend, displaced, experiment, features, gradient, length, module_of, rows_of
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax, softmax


def distillation(module, received, x, tau):
    """Return the distillation loss from the received model."""
    return kl_div(log_softmax(module(x) / tau, 1), softmax(received(x) / tau, 1), reduction="batchmean")


# ---- naive steps: (live module, received module, x, y, options) -> a tensor a parameter ----
def fedprox(module, received, x, y, mu):
    """Return FedProx's gradient."""
    distance = sum((p - q).square().sum() for p, q in zip(module.parameters(), received.parameters(), strict=True))
    return gradient(module, cross_entropy(module(x), y) + mu / 2 * distance)


def fedld(module, received, x, y, margin, variant="text"):
    """Return FedLD's gradient."""
    f = module(x)
    if variant == "code":
        term = torch.log(1 + (f.softmax(1) ** 2).sum())
    else:
        term = sum(torch.log(1 + sum(v * v for v in row)) for row in f) / len(f)
    return gradient(module, cross_entropy(f, y) + margin * term)


def fedntd(module, received, x, y, beta, tau):
    """Return FedNTD's gradient."""
    others = torch.ones(len(y), 4).scatter_(1, y[:, None], 0).bool()
    f = module(x)
    q = softmax(received(x)[others].view(-1, 3) / tau, 1)
    distilled = kl_div(log_softmax(f[others].view(-1, 3) / tau, 1), q, reduction="batchmean")
    return gradient(module, cross_entropy(f, y) + beta * tau**2 * distilled)


def feduv(module, received, x, y, mu=0.5, lam=1.0):
    """Return FedUV's gradient; by default lam is a quarter of the four classes."""
    z, f = features(module, x)
    n = len(y)
    d = torch.stack([(z[i] - z[j]).square().sum() for i in range(n) for j in range(i + 1, n)])
    U = (-d / d[d > 0].median()).exp().mean()
    P = softmax(f, 1)
    s = ((P - P.mean(0)).square().sum(0) / (n - 1)).sqrt()
    return gradient(module, cross_entropy(f, y) + mu * U + lam * torch.relu(0.5 - s).mean())


def feddecorr(module, received, x, y, beta, scale):
    """Return FedDecorr's gradient from the off-diagonal correlations of the features."""
    z, f = features(module, x)
    n, d = z.shape
    z = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
    K = z.T @ z / (n - 1)
    if scale == "paper":
        term = K.square().sum() / d**2
    else:
        pairs = [((n - 1) * K[i, j]) ** 2 for i in range(d) for j in range(d) if i != j]
        term = sum(pairs) / len(pairs) / n
    return gradient(module, cross_entropy(f, y) + beta * term)


def fedlc(module, received, x, y, tau):
    """Return the gradient of the mean of -log(exp(f_y - m_y) / sum_c exp(f_c - m_c)), m_c = tau n_c^(-1/4)."""
    f = module(x)
    e = [(f[:, c] - tau * ((y == c).sum().item() or 1e-8) ** -0.25).exp() for c in range(4)]
    return gradient(module, sum((sum(e) / e[c])[i].log() for i, c in enumerate(y.tolist())) / len(y))


def fedsam(module, received, x, y, rho):
    """Return FedSAM's gradient."""
    g = gradient(module, cross_entropy(module(x), y))
    with displaced(module, [rho * piece / length(g) for piece in g]):
        return gradient(module, cross_entropy(module(x), y))


def fedasam(module, received, x, y, rho, scaled):
    """Return FedASAM's gradient."""
    g = gradient(module, cross_entropy(module(x), y))
    named = module.named_parameters()
    T = [
        p.detach().abs() + 0.2 if scaled == "all" or name.endswith("weight") else torch.ones_like(p)
        for name, p in named
    ]
    size = length([t * piece for t, piece in zip(T, g, strict=True)])
    with displaced(module, [rho * t**2 * piece / size for t, piece in zip(T, g, strict=True)]):
        return gradient(module, cross_entropy(module(x), y))


def gradproj(module, received, x, y, tau):
    """Return GradProj's gradient; at w0 g_p is 0, although student and teacher are in different modes."""
    g_l = gradient(module, cross_entropy(module(x), y))
    pairs = zip(module.parameters(), received.parameters(), strict=True)
    if all(torch.equal(p, q) for p, q in pairs):
        return g_l
    with displaced(module, [torch.zeros_like(p) for p in module.parameters()]):  # statistics move in the first pass
        g_p = gradient(module, distillation(module, received, x, tau))
    along, square = (sum((a * b).sum() for a, b in zip(g, g_p, strict=True)) for g in (g_l, g_p))
    return [a - along / square * b for a, b in zip(g_l, g_p, strict=True)] if along < 0 else g_l


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (fedprox, {"mu": 0.3}),
        (fedld, {"margin": 0.3}),
        (fedld, {"margin": 0.3, "variant": "code"}),
        (fedntd, {"beta": 1.0, "tau": 1.0}),
        (fedntd, {"beta": 0.5, "tau": 3.0}),
        (feduv, {}),
        (feduv, {"mu": 1.0, "lam": 2.5}),
        (feddecorr, {"beta": 0.1, "scale": "code"}),
        (feddecorr, {"beta": 2.0, "scale": "paper"}),
        (fedlc, {"tau": 2.0}),
        (fedsam, {"rho": 0.5}),
        (fedasam, {"rho": 0.5, "scaled": "weights"}),
        (fedasam, {"rho": 0.5, "scaled": "all"}),
        (gradproj, {"tau": 2.0}),
    ],
)
def test_five_steps_equal_the_formula(client_of, step, options):
    """Batch statistics are included: only the first pass of a step updates them."""
    it = experiment(step.__name__, options)

    def plain(module, x, y):
        return gradient(module, cross_entropy(module(x), y))

    def direction(module, received, x, y):
        return step(module, received, x, y, **options)

    fedavg = descend(module_of(it), 5, plain, *rows_of(it))
    assert_trains_along(it, client_of(it), direction)
    moved = [
        (p - q).abs().max() for p, q in zip(fedavg.parameters(), it.experiment.net.module.parameters(), strict=True)
    ]
    assert max(moved) > 1e-5, "or the term does not matter"
    assert it.experiment.net.module[1].num_batches_tracked == 5


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 1.0)])
def test_five_steps_of_moon_equal_the_formula(client_of, mu, tau):
    """The last model has its own statistics; both reference models are in evaluation mode."""
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


def test_fedntds_distillation_has_no_gradient_at_the_received_model(client_of):
    it = experiment("fedntd")
    x, y = rows_of(it)
    client = client_of(it)
    it.experiment.net.module.eval()  # the teacher's mode, or batch statistics would differ

    def task_loss(client, x, y):
        return client.task_loss(client.logits(x), x, y)

    torch.testing.assert_close(client.grad(x, y), client.grad(x, y, loss=task_loss), rtol=0, atol=1e-15)
    client.w.add_(0.1)
    assert (client.grad(x, y) - client.grad(x, y, loss=task_loss)).abs().max() > 1e-4
