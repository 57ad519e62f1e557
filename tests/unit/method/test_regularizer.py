"""Penalties on the weights, in the hook `regularizer` or through client.w in `loss`, have the right gradient."""

from dataclasses import dataclass

import pytest
import torch
from helpers import prepare, settings

from fedmpi.common.errors import UserError
from fedmpi.method import FLAT, Method, Quadratic, Slots
from fedmpi.runtime import build

MU = 0.3


def run_with_hooks(monkeypatch, hooks, net="mlp", **changes):
    """Run two rounds with a method that has these hooks and declarations."""
    method = dataclass(frozen=True)(type("Mine", (Method,), hooks))()
    monkeypatch.setattr(build, "make_method", lambda *_: method)
    it = prepare(settings("fedavg", net, rounds=2, **changes))
    it.fed.run()
    return it


# ---- ways to add mu (w - w0) to the gradient ----
def by_autograd(self, k):
    """Return the proximal term for autograd."""
    return MU / 2 * (k.w - k.w0).square().sum()


def by_quadratic(self, k):
    """Return the proximal term as a Quadratic."""
    return Quadratic(MU, k.w0)


def in_gradient(self, k, g):
    """Add the gradient of the proximal term in the hook correct_gradient."""
    return g + MU * (k.w - k.w0)


def in_loss(self, k, x, y):
    """Add the proximal term to the loss."""
    return k.task_loss(k.logits(x), x, y) + MU / 2 * (k.w - k.w0).square().sum()


def in_step(self, k, x, y):
    """Add the gradient of the proximal term in the hook step."""
    return k.grad(x, y, loss=lambda k, x, y: in_loss(self, k, x, y))


def plain_step(self, k, x, y):
    """Return the gradient of the loss, as FedAvg does."""
    return k.grad(x, y)


def step_without_regularizer(self, k, x, y):
    """Return the gradient of the loss only; the regularizer is added by the engine."""
    return k.grad(x, y) + k.regularizer_grad(lambda k: MU / 2 * (k.w - k.w0).square().sum())


WAYS = {
    "autograd": {"regularizer": by_autograd},
    "quadratic": {"regularizer": by_quadratic},
    "loss": {"loss": in_loss},
    "step": {"step": in_step},
    "autograd beside a step": {"regularizer": by_autograd, "step": plain_step},
    "regularizer_grad": {"step": step_without_regularizer},
}
SETTINGS = {
    "plain": {},
    "clipped": {"train": {"clip_norm": 0.5}},
    "normalised": {"net": "norm"},
    "convolutions": {"net": "cnn"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", SETTINGS)
def test_the_gradient_of_the_regularizer_is_added(monkeypatch, way, changes):
    """However the gradient is computed, clients end where those end that add mu (w - w0) to the gradient themselves."""
    ways = (WAYS[way], {"correct_gradient": in_gradient}, {})
    mine, theirs, plain = (run_with_hooks(monkeypatch, hooks, **SETTINGS[changes]) for hooks in ways)
    torch.testing.assert_close(mine.w, theirs.w, rtol=0, atol=1e-6)
    assert (mine.w - plain.w).abs().max() > 1e-4
    if way not in ("loss", "step"):  # where it is a part of the loss
        assert mine.rows[0]["train_loss"] == pytest.approx(theirs.rows[0]["train_loss"], rel=1e-6)


@pytest.mark.parametrize("way", ["autograd", "quadratic", "loss"])
@pytest.mark.parametrize(("net", "momentum"), [("mlp", 0.0), ("mlp", 0.9), ("cnn", 0.9)])
def test_the_gradient_is_added_when_clients_are_trained_at_once(monkeypatch, way, net, momentum):
    one = run_with_hooks(monkeypatch, WAYS[way], net, train={"momentum": momentum})
    four = run_with_hooks(monkeypatch, WAYS[way], net, train={"momentum": momentum}, compute={"clients_per_pass": 4})
    torch.testing.assert_close(one.w, four.w, rtol=0, atol=1e-5)


def no_regularizer(self, k):
    """Return no penalty."""
    return None


def detached_loss(self, k, x, y):
    """Return a loss without a gradient in client.w."""
    return k.task_loss(k.logits(x), x, y) + 1000 * (k.w.detach() - 1).square().sum()


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("hooks", [{"regularizer": no_regularizer}, {"loss": detached_loss}])
def test_without_a_regularizer_the_run_equals_fedavg(monkeypatch, hooks, pack):
    mine, theirs = (run_with_hooks(monkeypatch, each, compute={"clients_per_pass": pack}) for each in (hooks, {}))
    torch.testing.assert_close(mine.w, theirs.w, rtol=0, atol=1e-6 if pack > 1 else 0)


def test_the_slope_of_a_quadratic_is_subtracted():
    g, w = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert Quadratic(2.0, torch.ones(2), torch.tensor([0.5, 0.0])).add_gradient(g, w) is g
    assert g.tolist() == [1 + 2 * (3 - 1) - 0.5, 2 + 2 * (5 - 1)]


def test_untrained_parameters_do_not_change(monkeypatch):
    it = run_with_hooks(monkeypatch, {"trains": ("head",), "regularizer": lambda self, k: k.w.square().sum()})
    segments = it.experiment.model.layout.segments
    assert all(torch.equal(s.view(it.w), s.view(it.w0)) == (s.group != "head") for s in segments)


def test_accumulators_keep_no_autograd_graph(monkeypatch):
    """client.w has a gradient when it is added to client.accumulators, but the sum has none."""
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
    run_with_hooks(monkeypatch, hooks, train={"lr": 1e-9})
    steps, total, w0 = seen[0]
    assert not total.requires_grad
    torch.testing.assert_close(total, 2 * steps * w0, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_the_hessian_includes_terms_of_the_weights(monkeypatch, weight):
    """It equals differences of gradients. The term is a product of client.w and the model's outputs."""
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

    run_with_hooks(monkeypatch, {"loss": loss, "step": step}, train={"batch_size": "full", "epochs": 1})
    exact, difference = seen[0]
    assert (exact - difference).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda self, k: k.w, r"hook regularizer returned shape \(\d+,\)"),
        (lambda self, k: 3.0, "hook regularizer returned float"),
        (lambda self, k: k.w.detach().sum(), "hook regularizer returned a value that does not depend on client.w"),
        (lambda self, k: Quadratic(1.0, k.w0[:3]), r"hook regularizer: Quadratic returned shape \(3,\)"),
    ],
)
def test_invalid_regularizers_are_rejected(monkeypatch, term, message, pack):
    with pytest.raises(UserError, match=rf"round 0, client \d: method Mine, {message}"):
        run_with_hooks(monkeypatch, {"regularizer": term}, compute={"clients_per_pass": pack})
