"""What several methods share: prototypes and their loss, distillation, the least point of the simplex."""

import pytest
import torch
from torch.nn.functional import mse_loss

from fedmpi.methods import _prototypes, _terms


def rows(m, n, seed=0, dtype=torch.float32):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_class_means():
    sums, counts = torch.tensor([[4.0, 2], [0, 0], [9, 3]]), torch.tensor([2.0, 0, 3])
    means, held = _prototypes.class_means(sums, counts)
    assert means.tolist() == [[2, 1], [0, 0], [3, 1]]
    assert held.tolist() == [1, 0, 1]


def test_prototype_loss():
    """torch's MSE where all classes have a prototype; samples of others count in the mean and add nothing."""
    z, y, protos = rows(6, 4), torch.tensor([0, 1, 2, 0, 1, 1]), rows(3, 4, 1)
    everyone = _prototypes.prototype_loss(z, y, protos, torch.ones(3))
    torch.testing.assert_close(everyone, mse_loss(z, protos[y]))
    some = _prototypes.prototype_loss(z, y, protos, torch.tensor([1.0, 0.0, 1.0]))
    expected = sum(((z[b] - protos[y[b]]) ** 2).sum() for b in (0, 2, 3)) / (6 * 4)
    torch.testing.assert_close(some, expected)
    assert _prototypes.prototype_loss(protos[y], y, protos, torch.ones(3)) == 0


STUDENT = torch.tensor([[2.0, 0, 0], [0, 1, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 1, 0], [0, 0, 2]], dtype=torch.float64)


@pytest.mark.parametrize(("tau", "value"), [(1.0, 0.5784575), (3.0, 0.0671393)])
def test_distillation_by_hand(tau, value):
    assert _terms.distillation(STUDENT, TEACHER, tau).item() == pytest.approx(value, abs=5e-8)
    q, s = (torch.softmax(f / tau, 1) for f in (TEACHER, STUDENT))
    naive = sum(q[b, c] * torch.log(q[b, c] / s[b, c]) for b in range(2) for c in range(3)) / 2
    assert _terms.distillation(STUDENT, TEACHER, tau).item() == pytest.approx(naive.item(), abs=1e-12)


def test_gradient_of_distillation():
    """d/df = (softmax(f / tau) - softmax(t / tau)) / (tau B)."""
    f = STUDENT.clone().requires_grad_()
    _terms.distillation(f, TEACHER, 3.0).backward()
    expected = (torch.softmax(STUDENT / 3, 1) - torch.softmax(TEACHER / 3, 1)) / 6
    torch.testing.assert_close(f.grad, expected, rtol=0, atol=1e-14)
    assert _terms.distillation(TEACHER, TEACHER, 3.0).item() == pytest.approx(0, abs=1e-15)


# ---- the simplex ----
def test_simplex_minimum_of_two():
    """a' P a with a = (t, 1 - t) is 2 t^2 + t (1 - t) + (1 - t)^2, least where 4 t - 1 = 0."""
    found = _prototypes.simplex_minimum(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    assert found.tolist() == pytest.approx([0.25, 0.75], abs=1e-9)


@pytest.mark.parametrize("m", [1, 3, 8, 20])
@pytest.mark.parametrize("rank", [2, 30])
def test_simplex_minimum_is_optimal(m, rank):
    """Convex, so these suffice: on the simplex, and the slope 2 P a is least, and equal, where a > 0."""
    R = rows(rank, m, m, torch.float64)
    P = R.T @ R + (0 if rank > m else 1e-3) * torch.eye(m, dtype=torch.float64)
    a = _prototypes.simplex_minimum(P)
    assert a.sum().item() == pytest.approx(1, abs=1e-12)
    assert a.min() >= 0
    slope = P @ a
    level = a @ slope
    torch.testing.assert_close(slope[a > 0], level.expand(int((a > 0).sum())), rtol=1e-6, atol=1e-9)
    assert slope.min() >= level * (1 - 1e-6)


def test_simplex_minimum_without_preference_is_uniform():
    for P in (torch.eye(4), torch.zeros(4, 4), 1e-20 * torch.eye(4)):
        assert _prototypes.simplex_minimum(P).tolist() == pytest.approx([0.25] * 4)


def test_what_is_not_finite_stays_visible():
    """Not an exception from an eigenproblem: what comes out is nan, which the engine reports with the client's name."""
    assert _prototypes.simplex_minimum(torch.full((2, 2), torch.inf)).isnan().any()
