"""Evaluation of the losses and regularizers that hooks return, with checks that they can be differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from fedmpi.engine.hook_checks import wrong
from fedmpi.method.base import Method
from fedmpi.method.context import Loss, Quadratic, Regularizer

ClientContext = Any  # the class in context.py, which imports this module
# Called directly, because Tensor.backward adds as much time as the backward pass of a small model takes.
_run_backward = Variable._execution_engine.run_backward
NO_GRADIENT = {
    "loss": "a loss that depends on no weight that is being trained",
    "regularizer": "a number that does not depend on client.w (return None where there is no term)",
}


def run_pass(client: ClientContext, loss: Loss, flat: bool, x: Tensor, y: Tensor) -> Tensor:
    """Run a forward and a backward pass on a batch at the current weights; return the loss ().

    Args:
        flat: whether to write the gradient to the flat vector `model.attach_gradient()`; otherwise autograd allocates
            a tensor for each parameter.
    """
    trainer, model = client.trainer, client.trainer.model
    if flat:
        model.attach_gradient().zero_()
    else:
        for p in model.parameters:
            p.grad = None
    if loss is trainer.direct or getattr(loss, "__code__", None) is Method.loss.__code__:
        value, leaf = checked(client, loss(client, x, y), "loss", loss), None
    else:
        with weights_as_leaf(client, client.w) as leaf:
            value = checked(client, loss(client, x, y), "loss", loss)
        if flat:
            leaf.grad = model.attach_gradient()
    backward(value)
    if leaf is not None and leaf.grad is not None and not flat:
        model.add_gradient(leaf.grad)
    return value


def add_regularizer(client: ClientContext, regularizer: Regularizer, at: Tensor, g: Tensor) -> Tensor:
    """Add the gradient of a regularizer at the weights `at` (d,) to g (d,) in place, and return g."""
    with weights_as_leaf(client, at) as leaf:
        value = regularizer(client)
    if value is None:
        return g
    if isinstance(value, Quadratic):
        for vector in (value.anchor,) if value.slope is None else (value.anchor, value.slope):
            client.check("regularizer: Quadratic", vector, tuple(at.shape), regularizer)
        return value.add_gradient(g, at)
    leaf.grad = g
    backward(checked(client, value, "regularizer", regularizer))
    return g


@contextmanager
def weights_as_leaf(client: ClientContext, w: Tensor) -> Iterator[Tensor]:
    """Let client.w be `w` (d,) as a leaf tensor that requires a gradient, within this context."""
    live, client.w = client.w, w.detach().requires_grad_()
    try:
        yield client.w
    finally:
        client.w = live
        if client.accumulator_row.requires_grad:  # a hook has added client.w to an accumulator; drop its graph
            client.accumulator_row = client.accumulator_row.detach()
            client.accumulators = client.trainer.messages.accumulators.views(client.accumulator_row)


def checked(client: ClientContext, value: Any, hook: str, by: Any = None) -> Tensor:
    """Return the result of a hook after checking that it is a scalar with a gradient.

    Args:
        by: the function that returned it, if it is not the method's own hook.
    """
    fine = type(value) is Tensor and value.requires_grad and not value.shape and value.layout is torch.strided
    if fine and value.is_floating_point() and value.device == client.w.device:
        return value  # the common case is fast; the code below finds out what is wrong
    client.check(hook, value, (), by)
    if not value.requires_grad:
        text = f"returned {NO_GRADIENT[hook]}, so that there is no gradient: it was made under no_grad, with .detach()"
        raise wrong(client.trainer.method, hook, client.where, f"{text} or .item(), or of other tensors", by)
    return value


def backward(loss: Tensor) -> None:
    """Add the gradients of a loss (), or of the sum of losses (n,), to the .grad of the parameters.

    Calls autograd's engine directly if possible. Subclasses of tensors, other devices and functorch transforms need
    loss.backward().
    """
    if type(loss) is not Tensor or not loss.is_cpu or torch._C._are_functorch_transforms_active():
        loss.sum().backward()
        return
    _run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
