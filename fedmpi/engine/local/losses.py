"""Gradients of the losses and regularizers that hooks return, and checks that these can be differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
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


def run_pass(
    client: ClientContext,
    loss: Loss,
    flat: bool,
    x: Tensor,
    y: Tensor,
    parts: int | None = None,
    share: float | None = None,
) -> Tensor:
    """Run a forward and a backward pass on a batch at the current weights; return the scalar loss.

    If the batch is processed in several parts, their gradients are added up, so that only the activations of one part
    are in memory at a time.

    Args:
        loss: the function (client, x, y) -> () whose gradient is computed.
        flat: whether to write the gradient to the flat vector that `model.attach_gradient()` returns; otherwise
            autograd allocates a tensor for each parameter.
        x: (B, ...) samples.
        y: (B,) targets.
        parts: the number of parts; None: as `count_parts` says.
        share: None: x and y are a whole batch, whose gradient replaces the stored one. A number: they are a part of a
            batch; its loss is multiplied by this number, and its gradient is added to the stored one.
    """
    trainer, model = client.trainer, client.trainer.model
    if share is None:
        if flat:
            model.attach_gradient().zero_()
        else:
            for p in model.parameters:
                p.grad = None
        parts = parts or (1 if client.accumulate == 1 else count_parts(client, len(y)))
        if parts > 1:
            return _run_parts(client, loss, flat, x, y, parts)
    if loss is trainer.fast_loss or getattr(loss, "__code__", None) is Method.loss.__code__:
        value, leaf = check_loss(client, loss(client, x, y), "loss", loss), None
    else:
        with weights_as_leaf(client, client.w) as leaf:
            value = check_loss(client, loss(client, x, y), "loss", loss)
        if flat:
            leaf.grad = model.attach_gradient()
    value = value if share is None else value * share
    if trainer.checkpoints_activations:
        with keep_batch_statistics(client):
            backward(value)
    else:
        backward(value)
    if leaf is not None and leaf.grad is not None and not flat:
        model.add_gradient(leaf.grad)
    return value


def _run_parts(client: ClientContext, loss: Loss, flat: bool, x: Tensor, y: Tensor, parts: int) -> Tensor:
    """Run the passes of all parts of a batch, one after another; return the loss of the batch."""
    losses = list[Tensor]()
    try:
        for part_x, part_y, share, scale in split_batch(client, x, y, parts):
            client.task_loss_scale = scale
            losses.append(run_pass(client, loss, flat, part_x, part_y, share=share).detach())
    finally:
        client.task_loss_scale = None
    return torch.stack(losses).sum()


def count_parts(client: ClientContext, n: int) -> int:
    """Return the number of parts of a batch of n samples: the fewest that are not larger than those of a full batch."""
    largest = -(-(client.batch_size or n) // client.accumulate)
    return -(-n // largest)


def split_batch(
    client: ClientContext, x: Any, y: Tensor, parts: int
) -> Iterator[tuple[Any, Tensor, float, Tensor | None]]:
    """Yield the parts of a batch, which have (nearly) equal sizes and at least one sample each.

    The mean loss of a batch of n samples is the sum of n_i / n times the mean loss of part i with n_i samples. The loss
    of the task may weight samples (class weights, ignored targets): with w_i = task.loss_weight(y_i), it is the sum of
    w_i / w times the loss of part i. The task's loss is therefore multiplied by w_i n / (w n_i) first.

    Yields:
        Samples and targets of the part, n_i / n, and the factor of the task's loss (None: 1).
    """
    task, n = client.trainer.task, len(y)
    parts = min(parts, n)
    bounds = [n * i // parts for i in range(parts + 1)]
    spans = [slice(*span) for span in pairwise(bounds)]
    shares = [(span.stop - span.start) / n for span in spans]
    weights = [task.loss_weight(y[span]) for span in spans]
    if not isinstance(weights[0], Tensor):
        yield from ((x[span], y[span], share, None) for span, share in zip(spans, shares, strict=True))
        return
    total = torch.stack(weights).double().sum()
    total = torch.where(total > 0, total, 1)  # no target counts: the task's loss is 0
    for span, share, weight in zip(spans, shares, weights, strict=True):
        yield x[span], y[span], share, weight / total / share


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
def keep_batch_statistics(client: ClientContext) -> Iterator[None]:
    """Context manager for a backward pass: restore the model's float and integer buffers afterwards.

    With gradient checkpointing, layers run forward again in the backward pass, and batch normalisation would update its
    statistics a second time.
    """
    model = client.trainer.model
    if not (client.trainer.checkpoints_activations and model.has_buffers):
        yield
        return
    b, counters = model.b.clone(), [counter.clone() for counter in model.batch_counters]
    yield
    model.load(model.w, b, counters)


@contextmanager
def weights_as_leaf(client: ClientContext, w: Tensor) -> Iterator[Tensor]:
    """Context manager: make client.w a leaf tensor with values w (d,) that requires grad; restore it on exit."""
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
