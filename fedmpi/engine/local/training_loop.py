"""The training loop: how a client steps through its batches, whatever the method.

The hot path is flat. While no hook reads gradients, autograd allocates its own and torch's fused SGD walks the views; a
hook that reads them gets one flat g that autograd accumulates into; small chains do without autograd
(mlp_backward.py). None of this changes the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import located_error
from fedmpi.data.batches import batches, grouped
from fedmpi.engine.checks import ReadOnlyCheck
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.local.losses import add_regularizer, run_pass
from fedmpi.engine.local.optimizers import LocalOptimizer
from fedmpi.flat.layout import Selection
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import Client, Loss, Regularizer
from fedmpi.method.values import Fitted

ClientContext = Any  # that of context.py, which imports this
PLAIN = Method()  # FedAvg's client
REMEDY = (
    "other passes would see it; make a copy (operations that end in _, assignments to [...] and ReLU(inplace=True) "
    "as the first layer write)"
)


class StepRule(NamedTuple):
    """How the steps of a fit get their gradients: from a pass over the batch or the hook `step`; what corrects them."""

    run_pass: Callable[[Tensor, Tensor], Tensor]  # (x, y) -> loss; leaves the gradient where the optimiser looks for it
    step: Callable[[Client, Tensor, Tensor], Tensor] | None
    regularizer: Regularizer | None
    correct: Callable[[Client, Tensor], Tensor] | None
    clipped: Selection | None  # the entries that clipping looks at
    flat: bool  # whether one of these looks at the gradient as one vector


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
    trainer, model = client.trainer, client.trainer.model
    config, plain = trainer.local_training.plain_sgd() if bare else trainer.local_training, plain or bare
    method = PLAIN if plain else trainer.method
    if groups is not None:
        trainer.messages.check_groups(groups, "client.fit, groups")
    if epochs is not None and not (isinstance(epochs, int | float) and 0 <= epochs < inf):
        raise UserError(f"client.fit: epochs is {epochs!r}; a number >= 0 is needed")
    batches = batches_of(
        client, epochs, method.batches_a_step, trainer.generators(client.round, client.id, client.fits)
    )
    client.fits += 1
    momentum, nesterov, carry = config.momentum, config.nesterov, 0.0
    before = client.steps, client.a, client.losses  # restored where another model is trained
    client.losses = client.losses if start is None else []
    since = len(client.losses)
    elsewhere = nullcontext() if start is None else client.elsewhere(start, buffers)
    with elsewhere, model.only(method.trains if groups is None else groups) as parameters:
        losses = client.losses
        if parameters:  # else the model has nothing in these groups
            trained = [s for s, p in model.members if p.requires_grad]
            kept = client.optim.of(trained) if client.optim and not plain and start is None else None
            optimiser = LocalOptimizer(config, parameters, client.lr if lr is None else lr, kept)
            clipped = model.layout.entries(trained) if (config.clip_norm, config.clip_value) != (None, None) else None
            rule = _choose_rule(client, method, loss, regularizer, parameters, clipped)
            for x, y in batches:
                client.step_loss, client.passed = None, False
                batch = ReadOnlyCheck({"x": x, "y": y})
                if rule.step:
                    _correct_gradient(client, rule, client.check("step", rule.step(client, x, y)))
                else:
                    client.note(rule.run_pass(x, y))
                    if rule.flat:
                        _correct_gradient(client, rule, None)
                if batch.written():
                    text = f"{client.where}: the model ({type(model.module).__name__}) or a hook of method "
                    text += f"{type(trainer.method).__name__} wrote to its batch, x or y: {REMEDY}"
                    raise located_error(text, model.module, type(trainer.method))
                if client.watch and start is None:
                    client.watch(x, y)
                optimiser.step()
                client.passed, client.version_at_w0 = True, None
                carry = momentum * carry + 1.0  # times a constant gradient: the velocity
                client.steps, client.a = client.steps + 1, client.a + (1 + momentum * carry if nesterov else carry)
                if client.step_loss is not None:
                    losses.append(client.step_loss)
        w, b = (model.w, model.b) if start is None else (model.w.clone(), model.b.clone())
    if start is not None:
        client.steps, client.a, client.losses = before
    return Fitted(w, b, partial(_mean_tensor, losses, since, len(losses), client.w.device))


def mean_loss(losses: Sequence[Tensor]) -> Tensor | float | None:
    """Return the mean of steps' losses (); None of no steps. On a CPU, where nobody waits for it, it is a number."""
    if not losses:
        return None
    if losses[0].device.type != "cpu":
        return torch.stack([*losses]).double().mean()
    return sum(map(float, losses)) / len(losses)


def _mean_tensor(losses: Sequence[Tensor], since: int, until: int, device: torch.device) -> Tensor:
    """() float64, over the steps from number `since` to `until`; 0 where none was made."""
    mean = mean_loss(losses[since:until])
    return torch.as_tensor(0.0 if mean is None else mean, dtype=torch.float64, device=device)


def _choose_rule(
    client: ClientContext,
    method: Method,
    loss: Loss | None,
    regularizer: Regularizer | None,
    parameters: Sequence[nn.Parameter],
    clipped: Selection | None,
) -> StepRule:
    """Choose how a fit gets its gradients, and set the model's gradients up for it.

    Args:
        loss, regularizer: in place of the method's hooks.
        parameters: what is trained.
        clipped: the entries of the gradient that count where it is clipped.
    """
    trainer, model, called = client.trainer, client.trainer.model, loss or client.trainer.direct or method.loss
    step = method.step if overrides(method, "step") and loss is None else None
    regularizer = regularizer or (method.regularizer if overrides(method, "regularizer") else None)
    correct = method.gradient if overrides(method, "gradient") else None
    flat = bool(step or regularizer or correct or clipped)
    run: Callable[[Tensor, Tensor], Tensor] = partial(run_pass, client, called, flat)
    if not flat:
        model.drop_gradient()
    if trainer.graphs is not None:
        of_task = called is trainer.direct or getattr(called, "__func__", None) is Method.loss
        # With counts that only the sites know, a task may weigh the classes for each client in its own way.
        if of_task and trainer.data.counts_shared:
            at = model.live.data_ptr(), model.attach_gradient().data_ptr() if flat else 0
            run = partial(trainer.graphs.run, (*at, called is trainer.direct, *map(id, parameters)), run, parameters)
    elif trainer.mlp_backward and not flat and called is trainer.direct and len(parameters) == len(model.parameters):
        trainer.mlp_backward.begin()
        run = trainer.mlp_backward
    return StepRule(run, step, regularizer, correct, clipped, flat)


def batches_of(
    client: ClientContext, epochs: float | None, many: int, drawn: tuple[Any, Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one fit, `many` for each step, pass after pass; of a pass begun in part the first ones.

    A batch of all rows has their own order, unless a step cuts it up. drawn: `trainer.generators`.
    """
    trainer, config = client.trainer, client.trainer.local_training
    passes, steps = config.passes_and_steps(client.n, many, epochs)
    _, a_pass = config.passes_and_steps(client.n, many, 1)
    order, augment = drawn
    for client.epoch in range(passes):
        rows = trainer.data.train[client.id]
        size = config.batch_size or (len(rows) if many > 1 else None)
        found = batches(rows, size, order, config.drop_last, augment=augment)
        for batch in found if many == 1 else grouped(found, many):
            if client.cut_short and trainer.stop():
                return
            client.last_epoch = steps <= a_pass
            yield batch
            steps -= 1
            if not steps:
                return


def _correct_gradient(client: ClientContext, rule: StepRule, stepped: Tensor | None) -> None:
    """Add the regularizer's gradient to that of a step, correct and clip it, and leave it where the optimiser looks.

    stepped: (d,) what the hook `step` returned; None where a pass has been made.
    """
    flat = client.trainer.model.attach_gradient()
    g = flat if stepped is None else flat.copy_(stepped) if rule.regularizer else stepped
    if rule.regularizer:
        g = add_regularizer(client, rule.regularizer, client.w, g)
    if rule.correct:
        g = client.check("gradient", rule.correct(client, g), by=rule.correct)
    if g is not flat:
        flat.copy_(g)
    if rule.clipped:
        _clip(flat, rule.clipped, client.trainer.local_training)


def _clip(g: Tensor, trained: Selection, how: LocalTrainingConfig) -> None:
    """Clip the entries of g (d,) to [-clip_value, clip_value], then g to the norm clip_norm, in place:

        g <- g min(1, clip_norm / (||g|| + 1e-6))        as torch.nn.utils.clip_grad_norm_ has it
    trained: the entries that count; a method's correction may have written to others.
    """
    if how.clip_value is not None:
        g.clamp_(-how.clip_value, how.clip_value)
    if how.clip_norm is not None:
        norm = (g if trained.whole else trained.take(g)).norm()
        g.mul_((how.clip_norm / (norm + 1e-6)).clamp_(max=1))  # no question to the device
