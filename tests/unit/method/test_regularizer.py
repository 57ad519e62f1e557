"""Terms of the weights: the hook `regularizer`, and k.w in `loss`, have their gradient in every way of training."""

from dataclasses import dataclass

import pytest
import torch
from helpers import prepare, settings

from fedmpi.common.errors import UserError
from fedmpi.method import FLAT, Method, Quadratic, Slots, option
from fedmpi.runtime import build

MU = 0.3


def play(monkeypatch, method, net="mlp", **changes):
    """A run of two rounds with a method that is no plug-in."""
    monkeypatch.setattr(build, "make_method", lambda *_: method)
    it = prepare(settings("fedavg", net, rounds=2, **changes))
    it.fed.run()
    return it


@dataclass(frozen=True)
class ByAutograd(Method):
    def regularizer(self, k):
        return MU / 2 * (k.w - k.w0).square().sum()


@dataclass(frozen=True)
class ByQuadratic(Method):
    def regularizer(self, k):
        return Quadratic(MU, k.w0)


@dataclass(frozen=True)
class InGradient(Method):
    def gradient(self, k, g):
        return g + MU * (k.w - k.w0)


@dataclass(frozen=True)
class InLoss(Method):
    def loss(self, k, x, y):
        return k.task_loss(k.logits(x), x, y) + MU / 2 * (k.w - k.w0).square().sum()


@dataclass(frozen=True)
class InStep(Method):
    def step(self, k, x, y):
        return k.grad(x, y, loss=lambda k, x, y: InLoss.loss(self, k, x, y))


@dataclass(frozen=True)
class BesideStep(ByAutograd):
    def step(self, k, x, y):
        return k.grad(x, y)


@dataclass(frozen=True)
class GradWith(Method):
    def step(self, k, x, y):
        return k.grad(x, y, at=k.w.clone(), regularizer=lambda k: Quadratic(MU, k.w0))


@dataclass(frozen=True)
class GradAlone(Method):
    def step(self, k, x, y):
        return k.grad(x, y) + k.regularizer_grad(lambda k: MU / 2 * (k.w - k.w0).square().sum(), at=k.w.clone())


@dataclass(frozen=True)
class Nothing(Method):
    def regularizer(self, k):
        return None


@dataclass(frozen=True)
class Detached(Method):
    def loss(self, k, x, y):
        return k.task_loss(k.logits(x), x, y) + 1000 * (k.w.detach() - 1).square().sum()


WAYS = [ByAutograd, ByQuadratic, InLoss, InStep, BesideStep, GradWith, GradAlone]
SETTINGS = {
    "plain": {},
    "clipped": {"train": {"clip_norm": 0.5}},
    "normalised": {"net": "norm"},
    "convolutions": {"net": "cnn"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", SETTINGS)
def test_its_gradient_is_added(monkeypatch, way, changes):
    """Whoever forms it, the clients end where those end that add mu (w - w0) to the gradient themselves."""
    mine, theirs = (play(monkeypatch, method(), **SETTINGS[changes]) for method in (way, InGradient))
    plain = play(monkeypatch, Method(), **SETTINGS[changes])
    torch.testing.assert_close(mine.w, theirs.w, rtol=0, atol=1e-6)
    assert (mine.w - plain.w).abs().max() > 1e-4
    if way not in (InLoss, InStep):  # where it is a part of the loss
        assert mine.rows[0]["train_loss"] == pytest.approx(theirs.rows[0]["train_loss"], rel=1e-6)


@pytest.mark.parametrize("way", [ByAutograd, ByQuadratic, InLoss])
@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_and_where_clients_train_together(monkeypatch, way, net, momentum):
    one = play(monkeypatch, way(), net, train={"momentum": momentum})
    four = play(monkeypatch, way(), net, train={"momentum": momentum}, compute={"pack": 4})
    torch.testing.assert_close(one.w, four.w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("method", [Nothing, Detached])
def test_no_term_is_fedavg(monkeypatch, method, pack):
    mine, theirs = (play(monkeypatch, each(), compute={"pack": pack}) for each in (method, Method))
    torch.testing.assert_close(mine.w, theirs.w, rtol=0, atol=1e-6 if pack > 1 else 0)


def test_slope_is_subtracted():
    g, w = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert Quadratic(2.0, torch.ones(2), torch.tensor([0.5, 0.0])).add_gradient(g, w) is g
    assert g.tolist() == [1 + 2 * (3 - 1) - 0.5, 2 + 2 * (5 - 1)]


def test_only_what_is_trained_moves(monkeypatch):
    @dataclass(frozen=True)
    class Head(ByAutograd):
        trains = ("head",)

        def regularizer(self, k):
            return k.w.square().sum()

    it = play(monkeypatch, Head())
    segments = it.made.model.layout.segments
    assert all(torch.equal(s.view(it.w), s.view(it.w0)) == (s.group != "head") for s in segments)


def test_accumulators_outlive_the_graph(monkeypatch):
    """k.w has a gradient where it is added to k.scratch; the sum has none."""

    @dataclass(frozen=True)
    class Sums(Method):
        scratch = Slots(sum=FLAT)
        seen = []

        def loss(self, k, x, y):
            k.scratch.sum.add_(k.w)
            return k.task_loss(k.logits(x), x, y)

        def regularizer(self, k):
            k.scratch.sum.add_(k.w)
            return (k.w - k.w0).square().sum()

        def upload(self, k):
            self.seen.append((k.steps, k.scratch.sum.clone(), k.w0.clone()))
            return Method.upload(self, k)

    it = play(monkeypatch, Sums(), train={"lr": 1e-9})
    steps, total, w0 = Sums.seen[0]
    assert not total.requires_grad
    torch.testing.assert_close(total, 2 * steps * w0, rtol=1e-4, atol=1e-4)
    assert it.reason == ""


def test_hessian_of_a_loss_with_such_a_term(monkeypatch):
    """By differences of gradients. The term is a product of k.w and the model's outputs, so that both ways meet."""

    @dataclass(frozen=True)
    class Both(Method):
        weight: float = option(0.0, "of the term")
        seen = []

        def loss(self, k, x, y):
            loss = k.task_loss(k.logits(x), x, y)
            return loss + self.weight * k.w.square().sum() * loss if self.weight else loss

        def step(self, k, x, y):
            v = torch.nn.functional.normalize(torch.linspace(-1, 1, len(k.w)), dim=0)
            at = k.w.clone()
            ahead, behind = (k.grad(x, y, at=at + sign * 1e-3 * v) for sign in (1, -1))
            self.seen.append((k.hessian_vector(x, y, v), (ahead - behind) / 2e-3))
            return k.grad(x, y)

    for weight in (0.0, 0.01):
        Both.seen.clear()
        play(monkeypatch, Both(weight), train={"batch_size": "full", "epochs": 1})
        exact, difference = Both.seen[0]
        assert (exact - difference).norm() < 0.05 * exact.norm()


BAD = {
    "vector": (lambda k: k.w, r"hook regularizer returned shape \(\d+,\)"),
    "number": (lambda k: 3.0, "hook regularizer returned float"),
    "constant": (lambda k: k.w.detach().sum(), "hook regularizer returned a number that does not depend on client.w"),
    "anchor": (lambda k: Quadratic(1.0, k.w0[:3]), r"hook regularizer: Quadratic returned shape \(3,\)"),
}


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("case", BAD)
def test_what_is_no_term(monkeypatch, case, pack):
    term, said = BAD[case]

    @dataclass(frozen=True)
    class Bad(Method):
        def regularizer(self, k):
            return term(k)

    with pytest.raises(UserError, match=rf"round 0, client \d: method Bad, {said}"):
        play(monkeypatch, Bad(), compute={"pack": pack})
