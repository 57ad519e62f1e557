"""The training loop, in which a client makes its steps on its batches, for all methods.

It is optimised for small models. While no hook reads gradients, autograd allocates them and torch's fused SGD updates
the parameter views. If a hook reads gradients, autograd accumulates into one flat vector g. Small chains of layers are
trained without autograd (mlp_backward.py). All three give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import make_located_error
from fedmpi.data.batches import batches, merge_batches
from fedmpi.engine.hook_checks import ReadOnlyCheck
from fedmpi.engine.local.client_optimizers import LocalOptimizer
from fedmpi.engine.local.losses import add_regularizer, run_pass
from fedmpi.flat.layout import Selection
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import FitResult, Regularizer

ClientContext = Any  # the class in context.py, which imports this module
FEDAVG = Method()  # for fits without the method's hooks
REMEDY = (
    "other passes would see it; make a copy (operations that end in _, assignments to [...] and ReLU(inplace=True) "
    "as the first layer write)"
)


def fit(
    client: ClientContext,
    epochs: int | None = None,
    *,
    groups: Sequence[str] | None = None,
    lr: float | None = None,
    start: Tensor | None = None,
    buffers: Tensor | None = None,
    regularizer: Regularizer | None = None,
    fedavg_steps: bool = False,
    plain_sgd: bool = False,
) -> FitResult:
    """Train the client: the batch loop of all methods. method/context.py, `Client.fit`, describes the arguments."""
    trainer, model = client.trainer, client.trainer.model
    config = trainer.local_training.plain_sgd() if plain_sgd else trainer.local_training
    fedavg_steps = fedavg_steps or plain_sgd
    method = FEDAVG if fedavg_steps else trainer.method
    if groups is not None:
        trainer.messages.check_groups(groups, "client.fit, groups")
    if epochs is not None and not (isinstance(epochs, int) and epochs >= 0):
        raise UserError(f"client.fit: epochs is {epochs!r}; a whole number >= 0 is needed")
    steps = batches_of(
        client, epochs, method.batches_per_step, trainer.generators(client.round, client.id, client.fits)
    )
    client.fits += 1
    other_model = nullcontext() if start is None else client.elsewhere(start, buffers)
    with other_model, model.train_only(method.trains if groups is None else groups) as parameters:
        if parameters:  # none if the model has no parameters in these groups
            trained = [s for s, p in model.segment_parameters if p.requires_grad]
            kept = client.optim.of(trained) if client.optim and not fedavg_steps else None
            optimiser = LocalOptimizer(config, parameters, client.lr if lr is None else lr, kept)
            clipped = None if config.clip_norm is None else model.layout.select_segments(trained)
            form_gradient = gradient_of_steps(client, method, regularizer, parameters, clipped)
            carry = 0.0
            for x, y in steps:
                client.step_loss, client.passed = None, False
                batch = ReadOnlyCheck({"x": x, "y": y})
                form_gradient(x, y)
                if batch.written():
                    text = f"{client.where}: the model ({type(model.module).__name__}) or a hook of method "
                    text += f"{type(trainer.method).__name__} wrote to its batch, x or y: {REMEDY}"
                    raise make_located_error(text, model.module, type(trainer.method))
                if client.watch:
                    client.watch(x, y)
                optimiser.step()
                client.passed, client.version_at_w0 = True, None
                carry = config.momentum * carry + 1.0  # the velocity is this number times a constant gradient
                client.gradient_weight += 1 + config.momentum * carry if config.nesterov else carry
                client.steps += 1
                if client.step_loss is not None:
                    client.losses.append(client.step_loss)
        return FitResult(model.w, model.b) if start is None else FitResult(model.w.clone(), model.b.clone())


def mean_loss(losses: Sequence[Tensor]) -> Tensor | float | None:
    """Return the mean loss of the steps, None without steps: a tensor () on a GPU, to avoid waiting, else a number."""
    if not losses:
        return None
    if losses[0].device.type != "cpu":
        return torch.stack([*losses]).double().mean()
    return sum(map(float, losses)) / len(losses)


def gradient_of_steps(
    client: ClientContext,
    method: Method,
    regularizer: Regularizer | None,
    parameters: Sequence[nn.Parameter],
    clipped: Selection | None,
) -> Callable[[Tensor, Tensor], None]:
    """Return a function (x, y) -> None that computes the gradient of a step and stores it in the parameters' .grad.

    The gradient is that of the loss of the batch, or the result of the hook `step`. The gradient of the regularizer is
    added, the hook `correct_gradient` corrects the sum, and the result is clipped.

    Args:
        regularizer: replaces the method's.
        parameters: the parameters that are trained.
        clipped: the entries whose norm train.clip_norm limits; the hook `correct_gradient` may have written to others.
    """
    trainer, model, called = client.trainer, client.trainer.model, client.trainer.direct or method.loss
    step = method.step if overrides(method, "step") else None
    regularizer = regularizer or (method.regularizer if overrides(method, "regularizer") else None)
    correct = method.correct_gradient if overrides(method, "correct_gradient") else None
    uses_flat = bool(step or regularizer or correct or clipped)
    run: Callable[[Tensor, Tensor], Tensor] = partial(run_pass, client, called, uses_flat)
    if not uses_flat:
        model.drop_gradient()
    if trainer.graphs is not None:
        of_task = called is trainer.direct or getattr(called, "__func__", None) is Method.loss
        # If only the sites know label counts, the task may weight classes differently for each client, which one
        # captured graph cannot do.
        if of_task and trainer.data.label_counts_shared:
            at = model.w_data.data_ptr(), model.attach_gradient().data_ptr() if uses_flat else 0
            run = partial(trainer.graphs.run, (*at, called is trainer.direct, *map(id, parameters)), run, parameters)
    elif (
        trainer.mlp_backward and not uses_flat and called is trainer.direct and len(parameters) == len(model.parameters)
    ):
        trainer.mlp_backward.begin()
        run = trainer.mlp_backward

    def form_gradient(x: Tensor, y: Tensor) -> None:
        if step:
            g = client.check("step", step(client, x, y))
        else:
            client.note(run(x, y))
            if not uses_flat:
                return
            g = model.attach_gradient()
        flat = model.attach_gradient()
        if regularizer:
            g = add_regularizer(client, regularizer, client.w, g if g is flat else flat.copy_(g))
        if correct:
            g = client.check("correct_gradient", correct(client, g), by=correct)
        if g is not flat:
            flat.copy_(g)
        if clipped:
            clip(flat, clipped, trainer.local_training.clip_norm)

    return form_gradient


def clip(g: Tensor, trained: Selection, most: float) -> None:
    """Scale g (d,) in place by min(1, most / (||g|| + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    The norm is that of the trained entries.
    """
    norm = (g if trained.selects_all else trained.take(g)).norm()
    g.mul_((most / (norm + 1e-6)).clamp_(max=1))  # without synchronising the device


def batches_of(
    client: ClientContext, epochs: int | None, many: int, drawn: tuple[Any, Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches (x, y) of one fit, of all its passes, with `many` batches concatenated for each step.

    A batch of all rows keeps the order of the rows, unless a step divides it.

    Args:
        drawn: the random generators for order and augmentation, from `trainer.generators`.
    """
    trainer, config = client.trainer, client.trainer.local_training
    passes, steps = config.passes_and_steps(client.n, many, epochs)
    _, a_pass = config.passes_and_steps(client.n, many, 1)
    order, augment = drawn
    for client.epoch in range(passes):
        rows = trainer.data.train[client.id]
        size = config.batch_size or (len(rows) if many > 1 else None)
        found = batches(rows, size, order, config.drop_last, augment=augment)
        for batch in found if many == 1 else merge_batches(found, many):
            if client.cut_short and trainer.stop():
                return
            client.last_epoch = steps <= a_pass
            yield batch
            steps -= 1
            if not steps:
                return
