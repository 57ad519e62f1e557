"""The training loop: how a client steps through its batches, whatever the method.

The hot path is flat. While no hook reads gradients, autograd allocates its own and torch's fused SGD walks the views; a
hook that reads them gets one flat g that autograd accumulates into; small chains do without autograd (by_hand.py). None
of this changes the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmpi.common.blame import told
from fedmpi.common.errors import UserError
from fedmpi.data.batches import batches, grouped
from fedmpi.engine.local.by_hand import ByHand
from fedmpi.engine.local.losses import add_regularizer, backward, loss_of
from fedmpi.engine.local.optimizers import SGD, Adaptive, make
from fedmpi.engine.local.recipe import Recipe
from fedmpi.engine.worker import Worker
from fedmpi.flat.layout import Segment, Selection
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import Client, Loss, Regularizer
from fedmpi.method.values import Fitted

ClientContext = Any  # that of context.py, which imports this
PLAIN = Method()  # FedAvg's client


class LossMeter:
    """The losses of optimiser steps. They are added up when the mean is asked for: once, not once a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.losses = device, list[Tensor]()

    def mean(self, since: int = 0, until: int | None = None) -> Tensor:
        """() float64, over the steps from number `since` on, up to `until`; 0 where none was made."""
        found = self.number(since, until)
        return torch.as_tensor(0.0 if found is None else found, dtype=torch.float64, device=self.device)

    def number(self, since: int = 0, until: int | None = None) -> Tensor | float | None:
        """The same, but None where none was made; on a CPU, where nobody waits for it, a number."""
        losses = self.losses[since:until]
        if not losses:
            return None
        if self.device.type != "cpu":
            return torch.stack(losses).double().mean()
        return sum(map(float, losses)) / len(losses)


class StepRule(NamedTuple):
    """How the steps of a fit get their gradients: from a loss or a `step` hook, then corrected and clipped."""

    loss: Loss
    regularizer: Regularizer | None = None
    correct: Callable[[Client, Tensor], Tensor] | None = None
    step: Callable[[Client, Tensor, Tensor], Tensor] | None = None
    clipped: Selection | None = None  # the entries that clipping looks at
    by_hand: ByHand | None = None  # which knows this loss, and leaves its gradient where the optimiser looks for it
    repeats: bool = False  # whether each pass computes the same of its batch and the model, so that a graph can do it

    @property
    def flat(self) -> bool:
        """Whether somebody looks at the gradient as one vector."""
        return bool(self.regularizer or self.correct or self.step or self.clipped)

    @classmethod
    def choose(
        cls,
        worker: Worker,
        method: Method,
        loss: Loss | None,
        regularizer: Regularizer | None,
        parameters: Sequence[nn.Parameter],
        trained: Sequence[Segment],
        clips: bool,
    ) -> StepRule:
        """Choose the rule of a fit, and set the model's gradients up for it.

        Args:
            loss, regularizer: in place of the method's hooks.
            parameters, trained: what is trained, and its segments.
            clips: whether gradients are clipped.
        """
        model = worker.model
        how = cls(
            loss=loss or worker.direct or method.loss,
            regularizer=regularizer or (method.regularizer if overrides(method, "regularizer") else None),
            correct=method.gradient if overrides(method, "gradient") else None,
            step=method.step if overrides(method, "step") and loss is None else None,
            clipped=model.layout.entries(trained) if clips else None,
        )
        if worker.graphs is not None:
            task_s = how.loss is worker.direct or getattr(how.loss, "__func__", None) is Method.loss
            # With counts that only the sites know, a task may weigh the classes for each client in its own way.
            how = how._replace(repeats=task_s and worker.data.counts_shared)
        if how.flat:
            return how
        model.drop_gradient()
        if (
            worker.by_hand is None
            or worker.graphs is not None
            or how.loss is not worker.direct
            or len(parameters) < len(model.parameters)
        ):
            return how
        worker.by_hand.begin()
        return how._replace(by_hand=worker.by_hand)


def fit(
    client: ClientContext,
    epochs: float | None = None,
    *,
    groups: Sequence[str] | None = None,
    lr: float | None = None,
    start: Tensor | None = None,
    buffers: Tensor | None = None,
    loss: Loss | None = None,
    regularizer: Regularizer | None = None,
    plain: bool = False,
    bare: bool = False,
) -> Fitted:
    """Train the client: the batch loop of all methods (method/context.py says what the arguments mean)."""
    worker, recipe, model = client.worker, client.worker.recipe, client.worker.model
    recipe, plain = recipe.bare() if bare else recipe, plain or bare
    method = PLAIN if plain else worker.method
    passes, steps = _count_steps(client, epochs, groups, method.batches_a_step)
    generators = worker.generators(client.round, client.id, client.fits)
    client.fits += 1
    momentum, later, nesterov, carry = recipe.momentum, 1 - recipe.dampening, recipe.nesterov, 0.0
    groups = method.trains if groups is None else groups
    with _train_elsewhere(client, start, buffers), model.only(groups) as parameters:
        meter, before = client.meter, len(client.meter.losses)
        if parameters:  # else the model has nothing in these groups
            trained = [s for s, p in model.members() if p.requires_grad]
            kept = client.optim.of(trained) if client.optim and not plain and start is None else None
            optimiser = make(recipe, parameters, client.lr if lr is None else lr, kept)
            how = StepRule.choose(worker, method, loss, regularizer, parameters, trained, recipe.clips)
            for x, y in _batches(client, generators, passes, steps, method.batches_a_step):
                client.step_loss, client.passed = None, False
                untouched = x._version, y._version
                _form_gradient(client, how, optimiser, x, y)
                if (x._version, y._version) != untouched:
                    raise _batch_modified_error(client)
                if client.watch and start is None:
                    client.watch(x, y)
                optimiser.step()
                client.passed, client.version_at_w0 = True, None
                carry = momentum * carry + later if carry else 1.0  # times a constant gradient: the velocity
                client.steps, client.a = client.steps + 1, client.a + (1 + momentum * carry if nesterov else carry)
                if client.step_loss is not None:
                    meter.losses.append(client.step_loss)
        w, b = (model.w, model.b) if start is None else (model.w.clone(), model.b.clone())
    return Fitted(w, b, partial(meter.mean, before, len(meter.losses)))


@contextmanager
def _train_elsewhere(client: ClientContext, start: Tensor | None, buffers: Tensor | None) -> Iterator[None]:
    """Train from other weights, then restore the live model and the record of its steps. None: the live weights."""
    if start is None:
        yield
        return
    before, client.meter = (client.steps, client.a, client.meter), LossMeter(client.w.device)
    with client.elsewhere(start, buffers):
        yield
    client.steps, client.a, client.meter = before


def _count_steps(
    client: ClientContext, epochs: float | None, groups: Sequence[str] | None, many: int
) -> tuple[int, int]:
    """Return how many passes one fit begins, and how many steps of `many` batches it makes."""
    client._check_groups(() if groups is None else groups, "fit, groups")
    if epochs is not None and not (isinstance(epochs, int | float) and 0 <= epochs < inf):
        raise UserError(f"k.fit: epochs is {epochs!r}; a number >= 0 is needed")
    return client.worker.recipe.amount(client.n, many, epochs)


def _batches(
    client: ClientContext, drawn: tuple[Any, Any], passes: int, steps: int, many: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of so many steps, `many` at a time, pass after pass.

    A batch of all rows has their own order, unless a step cuts it up.

    Args:
        drawn: `worker.generators`.
    """
    worker, recipe, (order, augment) = client.worker, client.worker.recipe, drawn
    _, a_pass = recipe.amount(client.n, many, 1)
    for client.epoch in range(passes):
        rows = worker.data.train[client.id]
        size = recipe.batch_size or (len(rows) if many > 1 else None)
        found = batches(rows, size, order, recipe.drop_last, augment=augment)
        for batch in found if many == 1 else grouped(found, many):
            if client.cut_short and worker.stop():
                return
            client.last_epoch = steps <= a_pass
            yield batch
            steps -= 1
            if not steps:
                return


def _batch_modified_error(client: ClientContext) -> UserError:
    """The error of a step that wrote to its batch."""
    said = (
        f"{client.where}: the model ({type(client.worker.model.module).__name__}) or a hook of method "
        f"{type(client.worker.method).__name__} wrote to its batch, x or y (an operation that ends in _, an "
        "assignment to [...], or ReLU(inplace=True) as the first layer): other passes would see it; make a copy"
    )
    return told(said, client.worker.model.module, type(client.worker.method))


def _form_gradient(client: ClientContext, how: StepRule, optimiser: SGD | Adaptive, x: Tensor, y: Tensor) -> None:
    """Compute the gradient of one batch, where the optimiser finds it."""
    model, graphs = client.worker.model, client.worker.graphs
    flat = model.attach_gradient() if how.flat else client.worker.nothing
    if how.step:
        g = client.check("step", how.step(client, x, y))
    else:
        if graphs is not None and how.repeats and isinstance(x, Tensor):
            at = model.live.data_ptr(), flat.data_ptr() if how.flat else 0
            kind = (*at, how.loss is client.worker.direct, *map(id, optimiser.parameters))
            loss = graphs.run(kind, partial(_passes, client, how, optimiser), x, y, optimiser.parameters)
        else:
            loss = _passes(client, how, optimiser, x, y)
        client.note(loss)
        if not how.flat:
            return
        g = flat
    if how.regularizer:
        g = add_regularizer(client, how.regularizer, client.w, g if g is flat else flat.copy_(g))
    if how.correct:
        g = client.check("gradient", how.correct(client, g), by=how.correct)
    if g is not flat:
        flat.copy_(g)
    if how.clipped:
        _clip(flat, how.clipped, client.worker.recipe)


def _passes(client: ClientContext, how: StepRule, optimiser: SGD | Adaptive, x: Tensor, y: Tensor) -> Tensor:
    """Make a forward and a backward pass; return the loss."""
    if how.by_hand:
        return how.by_hand(x, y)
    if how.flat:
        client.worker.model.attach_gradient().zero_()
    else:
        optimiser.zero_grad()
    value, leaf = loss_of(client, how.loss, x, y)
    if leaf is not None and how.flat:
        leaf.grad = client.worker.model.attach_gradient()
    backward(value)
    if leaf is not None and leaf.grad is not None and not how.flat:
        client.worker.model.add_gradient(leaf.grad)
    return value


def _clip(g: Tensor, trained: Selection, how: Recipe) -> None:
    """Clip the entries of g (d,) to [-clip_value, clip_value], then g to the norm clip_norm, in place:

        g <- g min(1, clip_norm / (||g|| + 1e-6))        as torch.nn.utils.clip_grad_norm_ has it
    trained: the entries that count; a method's correction may have written to others.
    """
    if how.clip_value is not None:
        g.clamp_(-how.clip_value, how.clip_value)
    if how.clip_norm is not None:
        norm = (g if trained.whole else trained.take(g)).norm()
        g.mul_((how.clip_norm / (norm + 1e-6)).clamp_(max=1))  # no question to the device
