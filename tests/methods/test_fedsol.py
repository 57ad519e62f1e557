"""FedSOL against the algorithm written out with two passes, and numbers by hand."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import play, prepare, settings
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedmpi import build
from fedmpi.layout import Segment
from fedmpi.method import Method
from fedmpi.methods.fedsol import FedSOL

NET = {"name": f"{Path(__file__).parent / 'nets.py'}:norm64"}
FULL = {"batch_size": "full", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}


def experiment(options, epochs, net=NET, **changes):
    return prepare(settings("fedsol", "norm", model=net, options=options, train={**FULL, "epochs": epochs}, **changes))


def rows_of(it, k):
    shard = it.made.data.train[k]
    return shard.x[shard.index], shard.y[shard.index]


def strength(p, start, norm):
    moved = (p - start).abs()
    length = moved.norm(dim=0, keepdim=True) if norm == "dim0" else moved.norm()
    return moved / length.clamp(min=1e-12)


def by_hand(module, x, y, steps, targets, rho, tau=3.0, norm="layer"):
    """Equations (4) to (7) of the method's file with two full passes; batch statistics belong to the first alone."""
    teacher = copy.deepcopy(module).eval()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    sgd = torch.optim.SGD(module.parameters(), FULL["lr"], FULL["momentum"], weight_decay=FULL["weight_decay"])
    for _ in range(steps):
        with torch.no_grad():
            q = softmax(teacher(x) / tau, 1)
        module.zero_grad()
        kl_div(log_softmax(module(x) / tau, 1), q, reduction="batchmean").backward()
        held = {name: p for name, p in module.named_parameters() if targets(name)}
        g_p = {name: p.grad.clone() for name, p in held.items()}
        length = torch.sqrt(sum(g.square().sum() for g in g_p.values()))
        saved = copy.deepcopy(module.state_dict())
        with torch.no_grad():
            for name, p in held.items():
                p += rho * strength(p, start[name], norm) * g_p[name] / (length + 1e-12)
        module.zero_grad()
        cross_entropy(module(x), y).backward()
        module.load_state_dict(saved)  # weights and all buffers
        sgd.step()
    return module


TARGETS = {
    "head": lambda name: name.startswith("5."),
    "body": lambda name: not name.startswith("5."),
    "all": lambda name: True,
}


@pytest.mark.parametrize("norm", ["layer", "dim0"])
@pytest.mark.parametrize("layers", TARGETS)
def test_five_steps_against_two_full_passes(client, layers, norm):
    """The one-pass form of the head, and batch statistics that the second pass does not touch."""
    it = experiment({"rho": 2.0, "layers": layers, "norm": norm}, 5)
    module = by_hand(copy.deepcopy(it.made.net.module), *rows_of(it, 0), 5, TARGETS[layers], 2.0, norm=norm)
    plain = by_hand(copy.deepcopy(it.made.net.module), *rows_of(it, 0), 5, TARGETS[layers], 0.0, norm=norm)
    it.made.method.train(client(it))
    mine, theirs = it.made.net.module.state_dict(), module.state_dict()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-11, msg=name)
    assert (plain[5].weight - module[5].weight).abs().max() > 1e-4  # the perturbation matters


def test_batch_statistics_that_count_batches(client):
    """momentum=None averages over num_batches_tracked batches: the second pass must not count as one."""
    it = experiment({"rho": 2.0, "layers": "all"}, 4, net={**NET, "momentum": None})
    module = by_hand(copy.deepcopy(it.made.net.module), *rows_of(it, 0), 4, TARGETS["all"], 2.0)
    it.made.method.train(client(it))
    torch.testing.assert_close(it.made.net.module[1].running_mean, module[1].running_mean, rtol=0, atol=1e-11)
    assert it.made.net.module[1].num_batches_tracked == 4


def test_the_teacher_is_the_received_model(client):
    """In evaluation mode with the received batch statistics, whoever's teacher it was before; the student moves."""
    it = experiment({"rho": 2.0}, 2, rounds=2)
    it.fed.run()
    x, _ = rows_of(it, 0)
    k = client(it, 0, round_=2)
    received = copy.deepcopy(it.made.net.module).eval()
    it.made.method.train(k)
    _, teacher = k.frozen(x)
    assert torch.equal(teacher, received(x))
    assert not torch.equal(it.made.net.module.eval()(x), teacher)
    assert (k.b0 - it.fed.clients.b0).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"rho": 0.0}, {"rho": 0.0, "layers": "all", "adaptive": False}])
def test_without_perturbation_it_is_fedavg(options):
    mine, theirs = play(settings("fedsol", "norm", options=options)), play(settings("fedavg", "norm"))
    assert mine.hashes == theirs.hashes


@pytest.mark.parametrize("layers", TARGETS)
def test_one_step_a_round_is_fedavg(layers):
    """At the first step of a round w = w0, so Lambda = 0 and eps is 0 exactly, however large rho."""
    train = {"batch_size": "full", "epochs": 1}
    mine = play(settings("fedsol", "mlp", options={"rho": 1e6, "layers": layers}, train=train))
    theirs = play(settings("fedavg", "mlp", train=train))
    assert mine.hashes == theirs.hashes
    two = play(settings("fedsol", "mlp", options={"rho": 2.0, "layers": layers}, train={**train, "epochs": 2}))
    more = play(settings("fedavg", "mlp", train={**train, "epochs": 2}))
    assert two.hashes != more.hashes


@pytest.mark.parametrize("adaptive", [True, False])
def test_no_perturbation_from_rounding_noise(client, adaptive):
    """||g_p|| < 1e-10 is noise: the fixed variant would blow it up to length rho."""
    it = experiment({}, 1)
    k, method = client(it), FedSOL(rho=2.0, adaptive=adaptive, layers="all")
    noise = torch.full_like(k.w, 1e-13)
    k.w.add_(1)
    assert not method.perturbation(k, noise).any()


def test_the_fixed_variant_with_cross_entropy_is_sam(client, monkeypatch):
    """KL(one-hot || softmax f) at tau = 1 is CE; with Lambda = 1 the step is SAM's: grad CE at w + rho g / ||g||."""
    it = experiment({"rho": 0.5, "layers": "all", "adaptive": False, "tau": 1.0}, 4)
    x, y = rows_of(it, 0)
    k = client(it)
    certain = 1e4 * torch.eye(4, dtype=torch.float64)[y]
    monkeypatch.setattr(k, "frozen", lambda rows: (None, certain))
    module = copy.deepcopy(it.made.net.module)
    sgd = torch.optim.SGD(module.parameters(), FULL["lr"], FULL["momentum"], weight_decay=FULL["weight_decay"])
    parameters = list(module.parameters())
    for _ in range(4):
        g = torch.autograd.grad(cross_entropy(module(x), y), parameters)
        length = torch.sqrt(sum(piece.square().sum() for piece in g))
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, piece in zip(parameters, g, strict=True):
                p += 0.5 * piece / length
        sgd.zero_grad()
        cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        sgd.step()
    it.made.method.train(k)
    torch.testing.assert_close(k.w, torch.nn.utils.parameters_to_vector(_flat_order(it, module)), rtol=0, atol=1e-11)


def _flat_order(it, module):
    """Parameters as the flat vector holds them: convolution weights as O,H,W,I blocks."""
    named = dict(module.named_parameters())
    return [
        named[s.name].permute(0, 2, 3, 1).contiguous() if s.channels_last else named[s.name]
        for s in it.made.model.layout.segments
    ]


# ---- the perturbation alone ----
def standing_at(w, w0):
    """A client with one 2 x 2 head."""
    segment = Segment("weight", (2, 2), 0, "head")
    w, w0 = (torch.tensor(v, dtype=torch.float64).flatten() for v in (w, w0))
    return SimpleNamespace(w=w, w0=w0, segments=lambda groups=None: [segment])


# |w - w0| = [[0, 1], [2, 3]]: over its norm sqrt 14, or column by column over 2 and sqrt 10.
# g_p = [[.1, .2], [.2, .4]] has norm .5, so rho / ||g_p|| = 4 for rho = 2.
@pytest.mark.parametrize(
    ("norm", "strengths"),
    [("layer", [0, 0.267261, 0.534522, 0.801784]), ("dim0", [0, 0.316228, 1, 0.948683])],
)
def test_strengths_by_hand(norm, strengths):
    k = standing_at([[1.0, 2], [3, 4]], [[1.0, 1], [1, 1]])
    g_p = torch.tensor([0.1, 0.2, 0.2, 0.4], dtype=torch.float64)
    eps = FedSOL(rho=2.0, norm=norm).perturbation(k, g_p)
    assert eps.tolist() == pytest.approx([4 * s * g for s, g in zip(strengths, g_p.tolist(), strict=True)], abs=2e-6)
    if norm == "layer":
        assert eps.tolist() == pytest.approx([0, 0.213809, 0.427618, 1.282854], abs=1e-6)


@pytest.mark.parametrize("adaptive", [True, False])
def test_never_longer_than_rho(client, adaptive):
    """Lambda <= 1. The fixed variant reaches rho exactly."""
    it = experiment({}, 1)
    k = client(it)
    g = torch.Generator().manual_seed(0)
    k.w.add_(torch.randn(k.w.shape, generator=g, dtype=torch.float64))
    eps = FedSOL(rho=1.5, adaptive=adaptive, layers="all").perturbation(k, torch.randn_like(k.w))
    assert eps.norm() <= 1.5 * (1 + 1e-12)
    assert (eps.norm() > 1.5 * (1 - 1e-12)) == (not adaptive)
    assert eps.norm() > 0.01


class Toy(Method):
    """FedSOL's perturbation along the gradient of |w|^2 / 2, for a model without a teacher."""

    def step(self, k, x, y):
        return k.grad(x, y, at=k.w + FedSOL(rho=0.5, adaptive=False, layers="all").perturbation(k, k.w))


def test_equilibrium_of_the_toy(quadratic):
    """L_local = ((u - 1)^2 + .1 (v - 1)^2) / 2, L_p = (u^2 + v^2) / 2, Lambda = 1, rho = .5.

    At rest w + eps is the local optimum, and eps points along w, so w lies on the ray to (1, 1) at length sqrt 2 - .5:
    (.6464466, .6464466).

    L_p's gradient at w is w itself. 4000 steps of .01 from the origin come near.
    """
    bowl = {"a": [[1.0, 0.1]], "b": [[1.0, 1.0]], "copies": [1]}
    config = quadratic(f"{__file__}:Toy", bowl, (0.0, 0.0), rounds=1, train={"epochs": 4000, "lr": 0.01})
    it = prepare(config, build.partitioned(config))
    it.fed.run()
    u = v = 0.0
    for _ in range(4000):
        r = (u * u + v * v) ** 0.5 or 1.0
        u, v = u - 0.01 * (u + 0.5 * u / r - 1), v - 0.01 * 0.1 * (v + 0.5 * v / r - 1)
    assert (u, v) == pytest.approx((0.645397, 0.642035), abs=5e-7)
    assert it.w.tolist() == pytest.approx([u, v], abs=1e-8)  # the data are float32: .1 is .1 + 1.5e-9
    ray = (2**0.5 - 0.5) / 2**0.5
    assert ray == pytest.approx(0.6464466, abs=5e-8)
    at = torch.tensor([ray, ray], dtype=torch.float64)
    eps = FedSOL(rho=0.5, adaptive=False, layers="all").perturbation(standing_on(at), at)
    assert (at + eps).tolist() == pytest.approx([1, 1], abs=1e-12)  # where the local gradient is zero
