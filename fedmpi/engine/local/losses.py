"""Losses and regularizers of hooks: their values with a graph, and whether these are something to descend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.checks import wrong
from fedmpi.engine.local.autograd import backward
from fedmpi.method.base import Method
from fedmpi.method.context import Loss, Regularizer
from fedmpi.method.values import Quadratic

ClientView = Any  # that of view.py, which imports this


def loss_of(view: ClientView, loss: Loss | None, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of a batch at the live weights.

    Args:
        loss: in place of the method's.

    Returns:
        The loss () with its graph; k.w as a leaf of that graph (None where no hook was called that could use it).
    """
    called = loss or view.worker.direct or view.worker.method.loss
    if called is view.worker.direct or getattr(called, "__code__", None) is Method.loss.__code__:
        return checked(view, called(view, x, y), "loss", loss), None
    with weights_as_leaf(view, view.w) as leaf:
        return checked(view, called(view, x, y), "loss", loss), leaf


def add_regularizer(view: ClientView, regularizer: Regularizer, at: Tensor, g: Tensor) -> Tensor:
    """Add the gradient of a regularizer at the weights `at` (d,) to g (d,), in place, and return that."""
    with weights_as_leaf(view, at) as leaf:
        value = regularizer(view)
    if value is None:
        return g
    if isinstance(value, Quadratic):
        for vector in (value.anchor,) if value.slope is None else (value.anchor, value.slope):
            view.check("regularizer: Quadratic", vector, tuple(at.shape), regularizer)
        return value.add_gradient(g, at)
    leaf.grad = g
    backward(checked(view, value, "regularizer", regularizer))
    return g


@contextmanager
def weights_as_leaf(view: ClientView, w: Tensor) -> Iterator[Tensor]:
    """Within, k.w is `w` (d,) as a leaf that requires a gradient."""
    live, view.w = view.w, w.detach().requires_grad_()
    try:
        yield view.w
    finally:
        view.w = live
        if view.scratch_row.requires_grad:  # a hook has added k.w to an accumulator, which outlives the graph
            view.scratch_row = view.scratch_row.detach()
            view.scratch = view.worker.messages.scratch.views(view.scratch_row)


def checked(view: ClientView, value: Any, hook: str, by: Any = None) -> Tensor:
    """Return the value of a hook if it is a scalar to descend on. by: the function that gave it, if not the hook."""
    fine = type(value) is Tensor and value.requires_grad and not value.shape and value.layout is torch.strided
    if fine and value.is_floating_point() and value.device == view.w.device:
        return value  # as nearly all are; what follows says what is wrong
    view.check(hook, value, (), by)
    if not value.requires_grad:
        why = {
            "loss": "returned a loss that depends on no weight that is being trained, so that there is no gradient: it "
            "was made under no_grad, with .detach() or .item(), or of outputs that are not the model's",
            "regularizer": "returned a number that does not depend on k.w, so that there is no gradient: it was made "
            "under no_grad, with .detach() or .item(), or of other weights; return None where there is no term",
        }
        raise wrong(view.worker.method, hook, view.where, why[hook], by)
    return value
