"""FedLD: both halves against their formulas, and a full round."""

import numpy as np
import pytest
import torch
from helpers import CPU, play, prepare, settings
from naive_fedld import principal_mean as literal
from torch.nn.functional import cross_entropy

from fedmpi.comm.backends.solo import Solo
from fedmpi.common.errors import UserError
from fedmpi.methods._terms import margin
from fedmpi.methods.fedld import FedLD
from fedmpi.runtime import build_data

LOGITS = torch.tensor([[1.0, 2, 2], [0, 0, 0]], dtype=torch.float64)
EVERYONE = {"cohort": {"fraction": 1.0}}


# ---- margin control ----
def test_margin_by_hand():
    """Norms 9 and 0: the mean of log 10 and log 1 is log(10) / 2; over the whole batch log(1 + 9)."""
    assert margin(LOGITS).item() == pytest.approx(1.151293, abs=5e-7)
    assert margin(LOGITS, "batch").item() == pytest.approx(2.302585, abs=5e-7)
    assert margin(LOGITS.softmax(1), "batch").item() == pytest.approx(0.538933, abs=5e-7)


def test_gradient_of_the_margin():
    """(lambda / B) 2 f / (1 + ||f||^2): one row (1, 2, 2), lambda = .1, gives (.02, .04, .04)."""
    f = LOGITS[:1].clone().requires_grad_()
    (0.1 * margin(f)).backward()
    assert f.grad[0].tolist() == pytest.approx([0.02, 0.04, 0.04], abs=1e-15)


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, lambda f: sum(torch.log(1 + sum(v * v for v in row)) for row in f) / len(f)),
        ({"margin_norm": "batch"}, lambda f: torch.log(1 + sum(v * v for row in f for v in row))),
        ({"margin_on": "probs", "margin_norm": "batch"}, lambda f: torch.log(1 + (f.softmax(1) ** 2).sum())),
    ],
)
def test_one_step_against_autograd(client, options, term):
    it = prepare(settings("fedld", options={"margin": 0.3, **options}, train={"batch_size": "full", "momentum": 0.0}))
    k = client(it)
    shard = it.made.data.train[0]
    x, y = shard.x[shard.index], shard.y[shard.index]
    f = it.made.net.module(x)
    parameters = list(it.made.net.module.parameters())
    g = torch.autograd.grad(cross_entropy(f, y) + 0.3 * term(f), parameters)
    it.made.method.train(k)
    expected = torch.cat([piece.flatten() for piece in g])
    torch.testing.assert_close((k.w0 - k.w) / 0.05, expected, rtol=0, atol=1e-5)


# ---- principal gradients ----
@pytest.mark.parametrize(("share", "correction"), [("l2", "text"), ("sum", "axis"), ("l2", "axis")])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_full_round_against_the_literal_steps(share, correction, weighting):
    options, cohort = {"share": share, "correction": correction}, {"fraction": 0.6, "weighting": weighting}
    it = play(settings("fedld", "cnn", rounds=1, options=options, cohort=cohort))
    G = it.uploads.dw.double().numpy()
    n = it.made.data.train_sizes[it.rows[0]["cohort"]].astype(float)
    p = n / n.sum() if weighting == "samples" else np.full(4, 1 / 4)
    assert G.shape == (4, it.w.numel())
    expected = literal(G, p, 0.8, share, correction)
    moved = (it.w.double() - it.w0.double()).numpy()
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-7)
    assert np.abs(expected - p @ G).max() > 1e-4  # not the mean


def test_tensor_by_tensor_against_a_naive_loop():
    it = play(settings("fedld", rounds=1, options={"scope": "tensor"}, **EVERYONE))
    G = it.uploads.dw.double()
    n = torch.from_numpy(it.made.data.train_sizes).double()
    at, moved = 0, (it.w.double() - it.w0.double()).numpy()
    for parameter in it.made.net.module.parameters():
        part = slice(at, at + parameter.numel())
        expected = literal(G[:, part].numpy(), (n / n.sum()).numpy())
        np.testing.assert_allclose(moved[part], expected, rtol=0, atol=1e-7)
        at = part.stop
    assert at == len(moved)


def test_published_is_the_authors_program():
    """One name for all that differs from the paper; margin, principal and keep stay what they are."""
    said = {"margin_on": "probs", "margin_norm": "batch", "scope": "tensor", "plain_first_round": True}
    said |= {"correction": "axis", "share": "sum"}
    one, other = FedLD(margin=0.1, published=True), FedLD(margin=0.1, **said)
    assert {**vars(one), "published": False} == vars(other)
    runs = [play(settings("fedld", rounds=2, options=options)).hashes for options in ({"published": True}, said)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "config",
    [
        settings("fedld", options={"share": "sum"}),  # what the default was, in an older config
        settings("fedavg", server={"rule": {"name": "principal", "share": "sum"}}),
    ],
)
def test_a_share_that_would_do_nothing(config):
    with pytest.raises(UserError, match="share: sum is a weight of correction: axis"):
        play(config)


def test_the_first_round_may_be_plain():
    plain = play(settings("fedld", rounds=2, options={"margin": 0.0, "plain_first_round": True}))
    fedavg = play(settings("fedavg", rounds=2))
    assert plain.hashes[0] == fedavg.hashes[0]
    assert plain.hashes[1] != fedavg.hashes[1]


# ---- both ----
def test_both_halves_off_is_fedavg_on_the_digits():
    """Bit for bit; and each half alone is something else."""
    runs = {}
    for name, options in (
        ("off", {"margin": 0.0, "principal": False}),
        ("margin", {"margin": 0.03, "principal": False}),
        ("principal", {"margin": 0.0}),
        ("fedavg", None),
    ):
        config = settings("fedavg" if options is None else "fedld", rounds=2, options=options or {})
        runs[name] = play(config, build_data.partitioned(config)).hashes
    assert runs["off"] == runs["fedavg"]
    assert len({hashes[-1] for hashes in runs.values()}) == 3


def test_divergence_names_the_client():
    """Not an eigenproblem's complaint."""
    config = settings("fedld", train={"lr": 1e30}, **EVERYONE)
    with pytest.raises(UserError, match=r"round 0: client .* sent values that are not finite"):
        play(config, comm=Solo(CPU))
