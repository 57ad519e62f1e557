"""What hooks give as a loss is one to descend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.checks import wrong
from fedmpi.method.base import Method
from fedmpi.method.context import Loss

ClientView = Any  # that of view.py, which imports this


def loss_of(view: ClientView, loss: Loss | None, x: Tensor, y: Tensor) -> Tensor:
    """The loss () of a batch at the live weights, with its graph. loss: None is the method's.

    At a client's first step of the round with this loss k.w is a leaf: a term of it would be in the recorded loss, and
    nobody would descend along it. A penalty written there would be no penalty, without a word.
    """
    called = loss or view.worker.method.loss
    code = getattr(called, "__code__", called)
    if called is view.worker.direct or code is Method.loss.__code__ or code in view.losses:
        return checked(view, called(view, x, y), loss)
    view.losses.add(code)
    with _as_leaf(view) as leaf:
        value = checked(view, called(view, x, y), loss)
    check_no_term(value, leaf, view.worker.method, view.where, loss)
    return value


@contextmanager
def _as_leaf(view: ClientView) -> Iterator[Tensor]:
    """k.w requires a gradient; what is written to k.scratch does not."""
    w, scratch = view.w, view.scratch
    view.w = leaf = w.detach().requires_grad_()
    if len(view.scratch_row):
        row = view.scratch_row.clone()
        view.scratch = view.worker.messages.scratch.views(row)
    try:
        yield leaf
    finally:
        if len(view.scratch_row):
            view.scratch_row.copy_(row.detach())
        view.w, view.scratch = w, scratch


def check_no_term(losses: Tensor, leaf: Tensor, method: Method, where: str, by: Any = None) -> None:
    """UserError if losses, of k.w made of `leaf`, have a term of k.w. by: what gave them, if not the hook."""
    if torch.autograd.grad(losses.sum(), leaf, retain_graph=True, allow_unused=True)[0] is not None:
        text = (
            "has a term of k.w, of which nobody takes the gradient: only the model's outputs lead to one. Add the "
            "term's gradient in the hook gradient (g + mu * (k.w - k.w0) for mu / 2 * |k.w - k.w0|^2), or write "
            "k.w.detach() where none is meant"
        )
        raise wrong(method, "loss", where, text, by)


def checked(view: ClientView, value: Any, by: Any = None) -> Tensor:
    """A loss to descend on. by: the function that gave it, if it is not the hook."""
    fine = type(value) is Tensor and value.requires_grad and not value.shape and value.layout is torch.strided
    if fine and value.is_floating_point() and value.device == view.w.device:
        return value  # as nearly all are; what follows says what is wrong
    view.check("loss", value, (), by)
    if not value.requires_grad:
        text = (
            "returned a loss that depends on no weight that is being trained, so that there is no gradient: it was "
            "made under no_grad, with .detach() or .item(), or of outputs that are not the model's"
        )
        raise wrong(view.worker.method, "loss", view.where, text, by)
    return value
