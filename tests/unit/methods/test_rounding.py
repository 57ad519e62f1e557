"""Rounding is not a direction: rules that ask only which way a gradient points get none where it is zero."""

import pytest
import torch
from helpers import prepare, small_settings
from naive import module_of, rows_of

from fedmpi.methods._terms import distillation, retention


@pytest.mark.parametrize("layers", ["head", "body", "all"])
def test_away_from_w0_the_direction_is_the_gradients(client_of, layers):
    """float32, one ordinary step from w0: eps is rho long and points as the gradient in float64 does."""
    it = prepare(small_settings("fedsol", "cnn", options={"rho": 2.0, "adaptive": False, "layers": layers}))
    client = client_of(it)
    x, y = rows_of(it)
    teacher = module_of(it).double().eval()
    eps = []

    def record(gradient):
        def recorded(*arguments, at=None, **options):
            if at is not None:
                eps.append(at - client.w)
            return gradient(*arguments, at=at, **options)

        return recorded

    client.w.sub_(0.05 * client.grad(x, y))
    client.grad, client.head_grad = record(client.grad), record(client.head_grad)
    it.made.method.step(client, x, y)
    student = module_of(it).double()
    loss = distillation(student(x.double()), teacher(x.double()).detach(), 3.0)
    g = dict(zip(dict(student.named_parameters()), torch.autograd.grad(loss, list(student.parameters())), strict=True))
    chosen = [s for s in client.segments() if layers in ("all", s.group)]
    size = torch.cat([g[s.name].flatten() for s in chosen]).norm()
    for s in client.segments():
        expected = 2.0 * g[s.name] / size if s in chosen else torch.zeros_like(g[s.name])
        torch.testing.assert_close(s.view(eps[0]).double(), expected, rtol=0, atol=1e-4, msg=s.name)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_retention_is_exactly_zero_up_to_rounding_and_not_beyond(dtype, scale):
    teacher = scale * torch.randn(20, 10, generator=torch.Generator().manual_seed(0), dtype=dtype)
    ulp = torch.finfo(dtype).eps * teacher.abs().max()
    for ulps, moves in ((0, False), (2, False), (100, True)):
        f = (teacher + ulps * ulp * torch.eye(20, 10, dtype=dtype)).requires_grad_()
        (g,) = torch.autograd.grad(retention(f, teacher, 3.0), f)
        assert bool(g.any()) == moves, ulps
