"""Rounding is not a direction: rules that ask only which way a gradient points get none where it is zero."""

import copy

import pytest
import torch
from helpers import prepare, small_settings

from fedmpi.methods._terms import distillation, retention


@pytest.mark.parametrize("layers", ["head", "body", "all"])
def test_away_from_w0_the_direction_is_the_gradients(client, layers):
    """float32, one ordinary step from w0: eps is rho long and points as the gradient in float64 does."""
    it = prepare(small_settings("fedsol", "cnn", options={"rho": 2.0, "adaptive": False, "layers": layers}))
    k, method = client(it), it.made.method
    shard = it.made.data.train[0]
    x, y = shard.x[shard.index], shard.y[shard.index]
    module = it.made.net.module
    teacher = copy.deepcopy(module).double().eval()
    g = k.grad(x, y)
    at = {}
    k.grad = lambda x, y, *, at=None, loss=None, grad=k.grad: moved(at, grad(x, y, at=at, loss=loss))
    k.head_grad = lambda z, loss, *, at=None, grad=k.head_grad: moved(at, grad(z, loss, at=at))

    def moved(where, g):
        if where is not None:
            at["eps"] = where - k.w
        return g

    k.w.sub_(0.05 * g)
    method.step(k, x, y)
    student = copy.deepcopy(module).double()
    loss = distillation(student(x.double()), teacher(x.double()).detach(), 3.0)
    pieces = torch.autograd.grad(loss, list(student.parameters()))
    named = dict(zip([name for name, _ in student.named_parameters()], pieces, strict=True))
    held = {"head": ("head",), "body": ("body",), "all": None}[layers]
    for s in k.segments():
        if held and s.group not in held:
            assert not s.view(at["eps"]).any()
            named[s.name] = torch.zeros_like(named[s.name])
    length = torch.cat([piece.flatten() for piece in named.values()]).norm()
    for s in k.segments():
        expected = 2.0 * named[s.name] / length
        torch.testing.assert_close(s.view(at["eps"]).double(), expected, rtol=0, atol=1e-4, msg=s.name)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_retention_is_exactly_zero_up_to_rounding_and_not_beyond(dtype, scale):
    teacher = scale * torch.randn(20, 10, generator=torch.Generator().manual_seed(0), dtype=dtype)
    ulp = torch.finfo(dtype).eps * teacher.abs().max()
    for apart, moves in ((0, False), (2, False), (100, True)):
        f = (teacher + apart * ulp * torch.eye(20, 10, dtype=dtype)).requires_grad_()
        (g,) = torch.autograd.grad(retention(f, teacher, 3.0), f)
        assert bool(g.any()) == moves, apart
