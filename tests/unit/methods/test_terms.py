"""What several methods share: prototypes and their loss, distillation, the least point of the simplex."""

import pytest
import torch

from fedmpi.methods import _prototypes, _terms


def rows(m, n, seed=0, dtype=torch.float32):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_class_means():
    sums, counts = torch.tensor([[4.0, 2], [0, 0], [9, 3]]), torch.tensor([2.0, 0, 3])
    means, held = _prototypes.class_means(sums, counts)
    assert means.tolist() == [[2, 1], [0, 0], [3, 1]]
    assert held.tolist() == [1, 0, 1]


STUDENT = torch.tensor([[2.0, 0, 0], [0, 1, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 1, 0], [0, 0, 2]], dtype=torch.float64)


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
