"""Terms of the weights: the hook `regularizer`, and k.w in `loss`, have their gradient in every way of training."""

from dataclasses import dataclass

import pytest
import torch
from helpers import prepare, settings

from fedmpi.common.errors import UserError
from fedmpi.method import FLAT, Method, Quadratic, Slots
from fedmpi.runtime import build

MU = 0.3


def play(monkeypatch, hooks, net="mlp", **changes):
    """A run of two rounds with a method of these hooks and declarations."""
    method = dataclass(frozen=True)(type("Mine", (Method,), hooks))()
    monkeypatch.setattr(build, "make_method", lambda *_: method)
    it = prepare(settings("fedavg", net, rounds=2, **changes))
    it.fed.run()
    return it


# ---- ways to add mu (w - w0) to the gradient ----
def by_autograd(self, k):
    return MU / 2 * (k.w - k.w0).square().sum()


def by_quadratic(self, k):
    return Quadratic(MU, k.w0)


def in_gradient(self, k, g):
    return g + MU * (k.w - k.w0)


def in_loss(self, k, x, y):
    return k.task_loss(k.logits(x), x, y) + MU / 2 * (k.w - k.w0).square().sum()


def in_step(self, k, x, y):
    return k.grad(x, y, loss=lambda k, x, y: in_loss(self, k, x, y))


def plain_step(self, k, x, y):
    return k.grad(x, y)


def step_beside_regularizer(self, k, x, y):
    return k.grad(x, y) + k.regularizer_grad(lambda k: MU / 2 * (k.w - k.w0).square().sum())


WAYS = {
    "autograd": {"regularizer": by_autograd},
    "quadratic": {"regularizer": by_quadratic},
    "loss": {"loss": in_loss},
    "step": {"step": in_step},
    "autograd beside a step": {"regularizer": by_autograd, "step": plain_step},
    "regularizer_grad": {"step": step_beside_regularizer},
}
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
    ways = (WAYS[way], {"correct_gradient": in_gradient}, {})
    mine, theirs, plain = (play(monkeypatch, hooks, **SETTINGS[changes]) for hooks in ways)
    torch.testing.assert_close(mine.w, theirs.w, rtol=0, atol=1e-6)
    assert (mine.w - plain.w).abs().max() > 1e-4
    if way not in ("loss", "step"):  # where it is a part of the loss
        assert mine.rows[0]["train_loss"] == pytest.approx(theirs.rows[0]["train_loss"], rel=1e-6)


@pytest.mark.parametrize("way", ["autograd", "quadratic", "loss"])
@pytest.mark.parametrize(("net", "momentum"), [("mlp", 0.0), ("mlp", 0.9), ("cnn", 0.9)])
def test_and_where_clients_train_together(monkeypatch, way, net, momentum):
    one = play(monkeypatch, WAYS[way], net, train={"momentum": momentum})
    four = play(monkeypatch, WAYS[way], net, train={"momentum": momentum}, compute={"clients_per_pass": 4})
    torch.testing.assert_close(one.w, four.w, rtol=0, atol=1e-5)


def no_term(self, k):
    return None


def detached_loss(self, k, x, y):
    return k.task_loss(k.logits(x), x, y) + 1000 * (k.w.detach() - 1).square().sum()


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("hooks", [{"regularizer": no_term}, {"loss": detached_loss}])
def test_no_term_is_fedavg(monkeypatch, hooks, pack):
    mine, theirs = (play(monkeypatch, each, compute={"clients_per_pass": pack}) for each in (hooks, {}))
    torch.testing.assert_close(mine.w, theirs.w, rtol=0, atol=1e-6 if pack > 1 else 0)


def test_slope_is_subtracted():
    g, w = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert Quadratic(2.0, torch.ones(2), torch.tensor([0.5, 0.0])).add_gradient(g, w) is g
    assert g.tolist() == [1 + 2 * (3 - 1) - 0.5, 2 + 2 * (5 - 1)]


def test_only_what_is_trained_moves(monkeypatch):
    it = play(monkeypatch, {"trains": ("head",), "regularizer": lambda self, k: k.w.square().sum()})
    segments = it.made.model.layout.segments
    assert all(torch.equal(s.view(it.w), s.view(it.w0)) == (s.group != "head") for s in segments)


def test_accumulators_outlive_the_graph(monkeypatch):
    """k.w has a gradient where it is added to k.accumulators; the sum has none."""
    seen = []

    def loss(self, k, x, y):
        k.accumulators.sum.add_(k.w)
        return k.task_loss(k.logits(x), x, y)

    def regularizer(self, k):
        k.accumulators.sum.add_(k.w)
        return (k.w - k.w0).square().sum()

    def upload(self, k):
        seen.append((k.steps, k.accumulators.sum.clone(), k.w0.clone()))
        return Method.upload(self, k)

    hooks = {"accumulators": Slots(sum=FLAT), "loss": loss, "regularizer": regularizer, "upload": upload}
    play(monkeypatch, hooks, train={"lr": 1e-9})
    steps, total, w0 = seen[0]
    assert not total.requires_grad
    torch.testing.assert_close(total, 2 * steps * w0, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_hessian_of_a_loss_with_such_a_term(monkeypatch, weight):
    """By differences of gradients. The term is a product of k.w and the model's outputs, so that both ways meet."""
    seen = []

    def loss(self, k, x, y):
        loss = k.task_loss(k.logits(x), x, y)
        return loss + weight * k.w.square().sum() * loss if weight else loss

    def step(self, k, x, y):
        v = torch.nn.functional.normalize(torch.linspace(-1, 1, len(k.w)), dim=0)
        at = k.w.clone()
        ahead, behind = (k.grad(x, y, at=at + sign * 1e-3 * v) for sign in (1, -1))
        seen.append((k.hessian_vector_product(x, y, v), (ahead - behind) / 2e-3))
        return k.grad(x, y)

    play(monkeypatch, {"loss": loss, "step": step}, train={"batch_size": "full", "epochs": 1})
    exact, difference = seen[0]
    assert (exact - difference).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda self, k: k.w, r"hook regularizer returned shape \(\d+,\)"),
        (lambda self, k: 3.0, "hook regularizer returned float"),
        (lambda self, k: k.w.detach().sum(), "hook regularizer returned a number that does not depend on client.w"),
        (lambda self, k: Quadratic(1.0, k.w0[:3]), r"hook regularizer: Quadratic returned shape \(3,\)"),
    ],
)
def test_what_is_no_term(monkeypatch, term, message, pack):
    with pytest.raises(UserError, match=rf"round 0, client \d: method Mine, {message}"):
        play(monkeypatch, {"regularizer": term}, compute={"clients_per_pass": pack})
