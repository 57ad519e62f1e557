"""GradProj: no step against what the received model knows."""

import pytest
import torch
from naive import assert_trains_along, displaced, experiment, gradient
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedmpi.methods.gradproj import without_conflict


def test_what_is_left_is_orthogonal():
    g = torch.Generator().manual_seed(0)
    for _ in range(9):
        g_l, g_p = torch.randn(2, 50, generator=g, dtype=torch.float64)
        left = without_conflict(g_l, g_p)
        assert (left @ g_p).item() == pytest.approx(max((g_l @ g_p).item(), 0), abs=1e-12)


def test_five_steps_against_the_formula(client_of):
    """Two passes at w; the first alone moves batch statistics. At w0 g_p is 0, though the student in training mode and
    the teacher in evaluation mode do not agree."""
    it = experiment("gradproj", {"tau": 2.0})
    conflicts = []

    def direction(module, received, x, y):
        g_l = gradient(module, cross_entropy(module(x), y))
        if not conflicts:
            conflicts.append(False)
            return g_l
        with displaced(module, [torch.zeros_like(p) for p in module.parameters()]):
            term = kl_div(log_softmax(module(x) / 2, 1), softmax(received(x) / 2, 1), reduction="batchmean")
            g_p = gradient(module, term)
        along = sum((a * b).sum() for a, b in zip(g_l, g_p, strict=True))
        square = sum(b.square().sum() for b in g_p)
        conflicts.append(bool(along < 0))
        return [a - along / square * b for a, b in zip(g_l, g_p, strict=True)] if along < 0 else g_l

    assert_trains_along(it, client_of(it), direction)
    assert any(conflicts)
