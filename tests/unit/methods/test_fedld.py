"""FedLD: both halves against their formulas, and a full round."""

import numpy as np
import pytest
import torch
from helpers import CPU, play, prepare, settings
from naive import assert_trains_along, experiment, gradient
from naive_fedld import principal_mean as literal
from torch.nn.functional import cross_entropy

from fedmpi.comm.base import Solo
from fedmpi.common.errors import UserError
from fedmpi.methods.fedld import margin

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
        ({"variant": "code"}, lambda f: torch.log(1 + (f.softmax(1) ** 2).sum())),
    ],
)
def test_one_step_against_autograd(client_of, options, term):
    it = experiment("fedld", {"margin": 0.3, **options})

    def direction(module, received, x, y):
        f = module(x)
        return gradient(module, cross_entropy(f, y) + 0.3 * term(f))

    assert_trains_along(it, client_of(it), direction)


# ---- principal gradients ----
RULE = {"server": {"rule": {"name": "principal", "correction": "axis", "share": "sum"}}}


@pytest.mark.parametrize(
    ("variant", "share", "correction"), [("text", "l2", "text"), ("printed", "l2", "axis"), (None, "sum", "axis")]
)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_full_round_against_the_literal_steps(variant, share, correction, weighting):
    """Two readings of the method, and the rule alone with the authors' weights of directions."""
    cohort = {"fraction": 0.6, "weighting": weighting}
    chosen = {"method": "fedavg", **RULE} if variant is None else {"method": "fedld", "options": {"variant": variant}}
    it = play(settings(net="cnn", rounds=1, cohort=cohort, **chosen))
    G = it.uploads.dw.double().numpy()
    n = it.made.data.train_sizes[it.rows[0]["cohort"]].astype(float)
    p = n / n.sum() if weighting == "samples" else np.full(4, 1 / 4)
    assert G.shape == (4, it.w.numel())
    expected = literal(G, p, 0.8, share, correction)
    moved = (it.w.double() - it.w0.double()).numpy()
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-7)
    assert np.abs(expected - p @ G).max() > 1e-4  # not the mean


def test_tensor_by_tensor_against_a_naive_loop():
    rule = {"rule": {"name": "principal", "scope": "tensor"}}
    it = play(settings("fedavg", rounds=1, server=rule, **EVERYONE))
    assert_moved_by_tensors(it, it.w - it.w0)


def assert_moved_by_tensors(it, moved, **reading):
    """The last round's move is the literal rule on each tensor by itself."""
    G, n = it.uploads.dw.double().numpy(), it.made.data.train_sizes
    for s in it.made.model.layout.segments:
        expected = literal(G[:, s.start : s.stop], n / n.sum(), **reading)
        np.testing.assert_allclose(moved[s.start : s.stop].numpy(), expected, rtol=0, atol=1e-7)


def test_code_is_the_authors_program():
    """Round 0 is the plain mean; after it the rule is theirs, tensor by tensor."""
    options, fedavg = {"margin": 0.0, "variant": "code"}, play(settings("fedavg", rounds=1, **EVERYONE))
    it = play(settings("fedld", rounds=2, options=options, **EVERYONE))
    assert it.hashes[0] == fedavg.hashes[0]
    assert_moved_by_tensors(it, it.w.double() - fedavg.w.double(), share="sum", correction="axis")


@pytest.mark.parametrize("key", ["correction", "share", "scope", "margin_on", "published"])
def test_the_old_options_name_the_new_one(key):
    with pytest.raises(UserError, match=rf"method\.{key}: is part of `variant` now: text, printed"):
        prepare(settings("fedld", options={key: "axis"}))


def test_a_share_that_would_do_nothing():
    with pytest.raises(UserError, match="share: sum is a weight of correction: axis"):
        play(settings("fedavg", server={"rule": {"name": "principal", "share": "sum"}}))


# ---- both; without either it is FedAvg: test_method_battery.py ----


def test_divergence_names_the_client():
    """Not an eigenproblem's complaint."""
    config = settings("fedld", train={"lr": 1e30}, **EVERYONE)
    with pytest.raises(UserError, match=r"round 0: client .* sent values that are not finite"):
        play(config, comm=Solo(CPU))
