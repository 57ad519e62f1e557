"""Terms of losses and steps equal values computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from fedmpi.flat.layout import Segment
from fedmpi.methods import _prototypes
from fedmpi.methods._terms import distillation_loss, distillation_with_exact_zero, scale_perturbation
from fedmpi.methods.fedasam import FedASAM
from fedmpi.methods.fedld import large_logits_penalty
from fedmpi.methods.fedntd import not_true_logits
from fedmpi.methods.feduv import uniformity, variance_term
from fedmpi.methods.moon import contrastive_loss


def tensor(*values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


STUDENT, TEACHER, Y = tensor((2, 0, 0), (0, 1, 0)), tensor((1, 1, 0), (0, 0, 2)), torch.tensor([0, 1])
LOGITS = tensor((1, 2, 2), (0, 0, 0))  # of norms 9 and 0
Z = tensor((0, 0), (1, 0), (0, 2))  # squared distances 1, 4, 5; sigma 4
TWICE = torch.cat([Z, Z[:1]])  # squared distances 1, 4, 0, 5, 1, 4
F = tensor((2, 0, 0), (0, 1, 0), (0, 0, 3))
ONE_HOT = torch.eye(4, dtype=torch.float64)
P, C0 = tensor((2, 0.5), (0, 0.5)), 0.5**0.5  # more spread than c0 = 1 / sqrt 2: deviations sqrt 2 and 0
MOON = tensor((1, 0), (1, 1)), tensor((1, 1), (1, 0)), tensor((0, 1), (1, 1))
W, G = tensor(1, -2, 0.5), tensor(0.3, 0.4, 0)


def not_true_term(f, tau):
    """Return FedNTD's term of (1)."""
    return tau**2 * distillation_loss(not_true_logits(f, Y), not_true_logits(TEACHER, Y), tau)


@pytest.mark.parametrize(
    ("value", "expected", "tolerance"),
    [
        # FedLD: the mean of log 10 and log 1; over the whole batch log(1 + 9)
        (large_logits_penalty(LOGITS), 1.151293, 5e-7),
        (large_logits_penalty(LOGITS, "batch"), 2.302585, 5e-7),
        (large_logits_penalty(LOGITS.softmax(1), "batch"), 0.538933, 5e-7),
        # FedNTD and MOON: computed in numpy
        (not_true_term(STUDENT, 1.0), 0.2193787, 5e-8),
        (not_true_term(STUDENT, 3.0), 0.2984086, 5e-8),
        (contrastive_loss(*MOON, 0.5), 0.6229779, 5e-8),
        (contrastive_loss(*MOON, 1.0), 0.6255563, 5e-8),
        # FedUV's U: (e^-1/4 + e^-1 + e^-5/4) / 3; distances of 0 count 1 each and do not enter sigma, 4 as before
        (uniformity(Z), 0.4777283, 5e-8),
        (uniformity(TWICE), (2 * math.exp(-1 / 4) + 2 * math.exp(-1) + math.exp(-5 / 4) + 1) / 6, 1e-12),
        (uniformity(Z[:1].expand(4, 2)), 1, 0),
        (uniformity(Z[:1]), 0, 0),
        # FedUV's V, and the variants of Table 6: the hinge stops at 0, the others count what is beyond c0
        (variance_term(F.softmax(1)), 0.2053841, 5e-8),
        (variance_term(F[:1].softmax(1)), 0, 0),
        (variance_term(ONE_HOT), 0, 1e-12),
        (variance_term(ONE_HOT.repeat(2, 1), "none"), 0.5 - (1.5 / 7) ** 0.5, 1e-12),
        (variance_term(P), (0 + C0) / 2, 1e-12),
        (variance_term(P, "none"), (C0 - 2**0.5 + C0) / 2, 1e-12),
        (variance_term(P, "squared"), ((C0 - 2**0.5) ** 2 + C0**2) / 2, 1e-12),
        (distillation_loss(TEACHER, TEACHER, 3.0), 0, 1e-15),
    ],
)
def test_terms_equal_values_by_hand(value, expected, tolerance):
    assert value.item() == pytest.approx(expected, abs=tolerance)


# ---- gradients ----
def gradient(term, at):
    """Return the value's gradient at a point."""
    x = at.clone().requires_grad_()
    return torch.autograd.grad(term(x) + 0 * x.sum(), x)[0]


def test_gradient_of_distillation():
    """d/df = (softmax(f / tau) - softmax(t / tau)) / (tau B)."""
    g = gradient(lambda f: distillation_loss(f, TEACHER, 3.0), STUDENT)
    torch.testing.assert_close(g, (torch.softmax(STUDENT / 3, 1) - torch.softmax(TEACHER / 3, 1)) / 6)


def test_the_true_logit_has_no_gradient():
    g = gradient(lambda f: not_true_term(f, 2.0), STUDENT)
    assert g[[0, 1], Y].tolist() == [0, 0]
    assert g.abs().sum() > 0.01
    f = torch.tensor([[5.0, 6, 7, 8]]).repeat(4, 1)
    assert not_true_logits(f, torch.arange(4)).tolist() == [[6, 7, 8], [5, 7, 8], [5, 6, 8], [5, 6, 7]]


def test_the_gradient_of_the_margin_by_hand():
    """(lambda / B) 2 f / (1 + ||f||^2): one row (1, 2, 2), lambda = .1, gives (.02, .04, .04)."""
    assert gradient(lambda f: 0.1 * large_logits_penalty(f), LOGITS[:1])[0].tolist() == pytest.approx(
        [0.02, 0.04, 0.04], abs=1e-15
    )


def test_the_gradient_of_uniformity_flows_through_sigma():
    """U does not depend on the scale of z, so its gradient is orthogonal to z; with a constant sigma it is not."""
    along = [(gradient(lambda z, d=detach: uniformity(z, d), Z) * Z).sum().item() for detach in (False, True)]
    assert along[0] == pytest.approx(0, abs=1e-12)
    assert along[1] < -0.1
    assert gradient(uniformity, TWICE).isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distillation_is_exactly_zero_if_logits_differ_by_rounding_only(dtype, scale):
    teacher = scale * torch.randn(20, 10, generator=torch.Generator().manual_seed(0), dtype=dtype)
    ulp = torch.finfo(dtype).eps * teacher.abs().max()
    for ulps, moves in ((0, False), (2, False), (100, True)):
        f = teacher + ulps * ulp * torch.eye(20, 10, dtype=dtype)
        assert bool(gradient(lambda f: distillation_with_exact_zero(f, teacher, 3.0), f).any()) == moves, ulps


# ---- perturbations ----
def test_the_perturbation_of_fedsam_by_hand():
    assert scale_perturbation(G, 0.1).tolist() == pytest.approx([0.06, 0.08, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "eta", "scaled", "expected"),
    [
        ("layer.bias", 0.0, "all", [0.0351123, 0.1872658, 0]),
        ("layer.bias", 0.2, "all", [0.0454359, 0.2036203, 0]),
        ("layer.weight", 0.2, "weights", [0.0454359, 0.2036203, 0]),
        ("layer.bias", 0.2, "weights", [0.06, 0.08, 0]),  # T = 1: SAM
    ],
)
def test_the_perturbation_of_fedasam_by_hand(name, eta, scaled, expected):
    client = SimpleNamespace(w=W, segments=lambda: [Segment(name, (3,), 0, "body")])
    eps = FedASAM(rho=0.1, eta=eta, scaled=scaled).perturbation(client, G)
    assert eps.tolist() == pytest.approx(expected, abs=5e-8)


# ---- FedDecorr ----
TWO, THREE = tensor((0, 0), (1, 2), (2, 1)), tensor((1, 0, 2), (2, 1, 0), (4, 1, 1), (1, 3, 0))


# ---- prototypes, and the least point of the simplex ----


@pytest.mark.parametrize("m", [1, 3, 8, 20])
@pytest.mark.parametrize("rank", [2, 30])
def test_simplex_minimum_is_optimal(m, rank):
    """The problem is convex: a must be on the simplex, and 2 P a must be smallest, and equal, where a > 0."""
    R = torch.randn(rank, m, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    P = R.T @ R + (0 if rank > m else 1e-3) * torch.eye(m, dtype=torch.float64)
    a = _prototypes.minimize_on_simplex(P)
    assert a.sum().item() == pytest.approx(1, abs=1e-12)
    assert a.min() >= 0
    slope = P @ a
    level = a @ slope
    torch.testing.assert_close(slope[a > 0], level.expand(int((a > 0).sum())), rtol=1e-6, atol=1e-9)
    assert slope.min() >= level * (1 - 1e-6)


def test_simplex_minimum_by_hand():
    """a' P a with a = (t, 1 - t) is 2 t^2 + t (1 - t) + (1 - t)^2, smallest for 4 t - 1 = 0.

    If all a are equally good, a is uniform; values that are not finite give nan, which the engine reports.
    """
    found = _prototypes.minimize_on_simplex(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    assert found.tolist() == pytest.approx([0.25, 0.75], abs=1e-9)
    for P in (torch.eye(4), torch.zeros(4, 4), 1e-20 * torch.eye(4)):
        assert _prototypes.minimize_on_simplex(P).tolist() == pytest.approx([0.25] * 4)
    assert _prototypes.minimize_on_simplex(torch.full((2, 2), torch.inf)).isnan().any()
