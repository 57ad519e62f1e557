"""Gradients of the losses and regularizers that hooks return, and checks that these can be differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from fedmpi.engine.hook_checks import hook_error
from fedmpi.method.base import Method
from fedmpi.method.context import Loss, Quadratic, Regularizer

ClientContext = Any  # the class in client_context.py, which imports this module
# Called directly, because the overhead of Tensor.backward is as long as the backward pass of a small model.
_run_backward = Variable._execution_engine.run_backward
NO_GRADIENT_REASONS = {
    "loss": "a loss that does not depend on any trained weight",
    "regularizer": "a value that does not depend on client.w (for no penalty return None)",
}


def run_pass(client: ClientContext, loss: Loss, flat: bool, x: Tensor, y: Tensor) -> Tensor:
    """Run a forward and a backward pass on a batch at the current weights; return the scalar loss.

    Args:
        loss: the function (client, x, y) -> () whose gradient is computed.
        flat: whether to write the gradient to the flat vector that `model.attach_gradient()` returns; otherwise
            autograd allocates a tensor for each parameter.
        x: (B, ...) samples.
        y: (B,) targets.
    """
    trainer, model = client.trainer, client.trainer.model
    if flat:
        model.attach_gradient().zero_()
    else:
        for p in model.parameters:
            p.grad = None
    if loss is trainer.fast_loss or getattr(loss, "__code__", None) is Method.loss.__code__:
        value, leaf = check_loss(client, loss(client, x, y), "loss", loss), None
    else:
        with weights_as_leaf(client, client.w) as leaf:
            value = check_loss(client, loss(client, x, y), "loss", loss)
        if flat:
            leaf.grad = model.attach_gradient()
    backward(value)
    if leaf is not None and leaf.grad is not None and not flat:
        model.add_gradient(leaf.grad)
    return value


def add_regularizer(client: ClientContext, regularizer: Regularizer, at: Tensor, g: Tensor) -> Tensor:
    """Add the gradient of a regularizer, evaluated at the weights `at` (d,), to g (d,) in place, and return g."""
    with weights_as_leaf(client, at) as leaf:
        value = regularizer(client)
    if value is None:
        return g
    if isinstance(value, Quadratic):
        for vector in (value.anchor,) if value.slope is None else (value.anchor, value.slope):
            client.check_result("regularizer: Quadratic", vector, tuple(at.shape), regularizer)
        return value.add_gradient(g, at)
    leaf.grad = g
    backward(check_loss(client, value, "regularizer", regularizer))
    return g


@contextmanager
def weights_as_leaf(client: ClientContext, w: Tensor) -> Iterator[Tensor]:
    """Context manager: make client.w a leaf tensor with values w (d,) that requires a gradient; restore it on exit."""
    live, client.w = client.w, w.detach().requires_grad_()
    try:
        yield client.w
    finally:
        client.w = live
        if client.accumulator_row.requires_grad:  # a hook has added client.w to an accumulator: drop the graph
            client.accumulator_row = client.accumulator_row.detach()
            client.accumulators = client.trainer.messages.accumulators.views(client.accumulator_row)


def check_loss(client: ClientContext, value: Any, hook: str, by: Any = None) -> Tensor:
    """Raise UserError if the result of a hook is not a scalar tensor with a gradient; return the result.

    Args:
        hook: the name of the hook, `loss` or `regularizer`.
        by: the function that returned the value, if it is not the method's own hook.
    """
    is_scalar = type(value) is Tensor and value.requires_grad and not value.shape and value.layout is torch.strided
    if is_scalar and value.is_floating_point() and value.device == client.w.device:
        return value  # a fast path; the code below builds the error message
    client.check_result(hook, value, (), by)
    if not value.requires_grad:
        text = f"returned {NO_GRADIENT_REASONS[hook]}, so there is no gradient; the usual cause is no_grad, .detach(), "
        text += ".item(), or a value that was computed from other tensors"
        raise hook_error(client.trainer.method, hook, client.where, text, by)
    return value


def backward(loss: Tensor) -> None:
    """Add the gradients of a loss (), or of the sum of losses (n,), to the .grad of the parameters.

    On a CPU the function calls autograd's engine directly, which is faster. Tensor subclasses, other devices and
    functorch transforms need loss.backward().
    """
    if type(loss) is not Tensor or not loss.is_cpu or torch._C._are_functorch_transforms_active():
        loss.sum().backward()
        return
    _run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
