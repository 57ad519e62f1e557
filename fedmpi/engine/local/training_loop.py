"""The local training loop, which all methods share.

The loop is optimised for small models. If no hook reads gradients, autograd allocates them and torch's fused SGD
updates the parameters, which are views of w. If a hook reads gradients, autograd accumulates them in one flat vector g.
Small chains of layers are trained without autograd (mlp_backward.py). The results of the three variants are bitwise
identical.
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

ClientContext = Any  # the class in client_context.py, which imports this module
FEDAVG = Method()  # for fits without the method's hooks
BATCH_WRITE_REMEDY = (
    "later passes use the same tensor, so make a copy (operations that end in _, assignments to [...], and "
    "ReLU(inplace=True) as the first layer write to their input)"
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
    """Train the client; see `Client.fit` in method/context.py for the arguments."""
    trainer, model = client.trainer, client.trainer.model
    config = trainer.local_training.with_plain_sgd() if plain_sgd else trainer.local_training
    fedavg_steps = fedavg_steps or plain_sgd
    method = FEDAVG if fedavg_steps else trainer.method
    if groups is not None:
        trainer.messages.check_groups(groups, "client.fit, groups")
    if epochs is not None and not (isinstance(epochs, int) and epochs >= 0):
        raise UserError(f"client.fit: epochs is {epochs!r}; it must be an integer >= 0")
    if trainer.private_steps is not None:
        steps = trainer.private_steps.iterate_batches(client, epochs)
    else:
        generators = trainer.make_generators(client.round, client.id, client.num_fits)
        steps = iterate_batches(client, epochs, method.batches_per_step, generators)
    client.num_fits += 1
    temporary_model = nullcontext() if start is None else client.temporary_model(start, buffers)
    with temporary_model, model.train_only(method.trains if groups is None else groups) as parameters:
        if parameters:  # none if the model has no parameters in these groups
            trained = [s for s, p in model.segment_parameters if p.requires_grad]
            stored = client.optimizer_state.views(trained) if client.optimizer_state and not fedavg_steps else None
            optimiser = LocalOptimizer(config, parameters, client.lr if lr is None else lr, stored)
            clipped = None if config.clip_norm is None else model.layout.select_segments(trained)
            form_gradient = make_gradient_function(client, method, regularizer, parameters, clipped)
            momentum_sum = 0.0
            for x, y in steps:
                client.step_loss, client.has_passed = None, False
                batch = ReadOnlyCheck({"x": x, "y": y})
                form_gradient(x, y)
                if batch.find_write():
                    text = f"{client.where}: the model ({type(model.module).__name__}) or a hook of method "
                    text += f"{type(trainer.method).__name__} wrote to its batch, x or y; {BATCH_WRITE_REMEDY}"
                    raise make_located_error(text, model.module, type(trainer.method))
                if client.on_step:
                    client.on_step(x, y)
                optimiser.step()
                client.has_passed, client.version_at_w0 = True, None
                # With a constant gradient g, the velocity would be momentum_sum * g.
                momentum_sum = config.momentum * momentum_sum + 1.0
                client.gradient_weight += 1 + config.momentum * momentum_sum if config.nesterov else momentum_sum
                client.steps += 1
                if client.step_loss is not None:
                    client.losses.append(client.step_loss)
        return FitResult(model.w, model.b) if start is None else FitResult(model.w.clone(), model.b.clone())


def mean_loss(losses: Sequence[Tensor]) -> Tensor | float | None:
    """Return the mean of the losses of all steps; None if there were no steps.

    On a GPU, the result is a tensor of shape (), because converting it to a number would force a wait for the GPU.
    """
    if not losses:
        return None
    if losses[0].device.type != "cpu":
        return torch.stack([*losses]).double().mean()
    return sum(map(float, losses)) / len(losses)


def make_gradient_function(
    client: ClientContext,
    method: Method,
    regularizer: Regularizer | None,
    parameters: Sequence[nn.Parameter],
    clipped: Selection | None,
) -> Callable[[Tensor, Tensor], None]:
    """Return a function (x, y) -> None that computes the gradient of a step and stores it in the parameters' .grad.

    The function computes the gradient of the batch loss, or calls the hook `step`. If samples have differential
    privacy, the gradient has noise. Then the function adds the gradient of the regularizer, passes the sum to the hook
    `correct_gradient`, and clips the result.

    Args:
        method: the method whose hooks are used.
        regularizer: a function that replaces the method's hook `regularizer`; None: the hook is used.
        parameters: the parameters that are trained.
        clipped: the entries of the trained parameters, or None if gradients are not clipped. Only these entries count
            in the norm that train.clip_norm limits, because the hook `correct_gradient` may have written to others.
    """
    trainer, model, loss = client.trainer, client.trainer.model, client.trainer.fast_loss or method.loss
    step = method.step if overrides(method, "step") else None
    regularizer = regularizer or (method.regularizer if overrides(method, "regularizer") else None)
    correct = method.correct_gradient if overrides(method, "correct_gradient") else None
    uses_flat = bool(step or regularizer or correct or clipped or trainer.private_steps)
    run: Callable[[Tensor, Tensor], Tensor | None] = partial(run_pass, client, loss, uses_flat)
    if not uses_flat:
        model.drop_gradient()
    if trainer.private_steps is not None:
        run = trainer.private_steps.make_gradient_function(client, method, parameters)
    elif trainer.graphs is not None:
        is_task_loss = loss is trainer.fast_loss or getattr(loss, "__func__", None) is Method.loss
        # If label counts are private to the sites, the task may weight classes differently for each client, which a
        # captured graph cannot do.
        if is_task_loss and trainer.data.label_counts_shared:
            memory = model.w_data.data_ptr(), model.attach_gradient().data_ptr() if uses_flat else 0
            kind = (*memory, loss is trainer.fast_loss, *map(id, parameters))
            run = partial(trainer.graphs.run, kind, run, parameters)
    elif (
        trainer.mlp_backward
        and not uses_flat
        and loss is trainer.fast_loss
        and len(parameters) == len(model.parameters)
    ):
        trainer.mlp_backward.attach_gradients()
        run = trainer.mlp_backward

    def form_gradient(x: Tensor, y: Tensor) -> None:
        if step:
            g = client.check_result("step", step(client, x, y))
        else:
            value = run(x, y)
            if value is not None:  # the loss of a private step is not recorded
                client.record_loss(value)
            if not uses_flat:
                return
            g = model.attach_gradient()
        flat = model.attach_gradient()
        if regularizer:
            g = add_regularizer(client, regularizer, client.w, g if g is flat else flat.copy_(g))
        if correct:
            g = client.check_result("correct_gradient", correct(client, g), by=correct)
        if g is not flat:
            flat.copy_(g)
        if clipped:
            clip_gradient(flat, clipped, trainer.local_training.clip_norm)

    return form_gradient


def clip_gradient(g: Tensor, trained: Selection, max_norm: float) -> None:
    """Scale g (d,) in place by min(1, max_norm / (||g|| + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    ||g|| is the norm over the entries that are trained.
    """
    norm = (g if trained.selects_all else trained.take(g)).norm()
    g.mul_((max_norm / (norm + 1e-6)).clamp_(max=1))  # without synchronising the device


def iterate_batches(
    client: ClientContext, epochs: int | None, batches_per_step: int, generators: tuple[Any, Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples and targets (x, y) of each step of a fit(); stop early if the run is asked to stop.

    Without train.batch_size, a batch contains all rows; they are shuffled only if a step needs several batches.

    Args:
        epochs: number of epochs that replaces the configured epochs or steps; None: as configured.
        batches_per_step: the number of batches that are concatenated for each step.
        generators: the random generators for the sample order and the augmentation, from `trainer.make_generators`.
    """
    trainer, config = client.trainer, client.trainer.local_training
    passes, steps = config.passes_and_steps(client.n, batches_per_step, epochs)
    _, steps_per_pass = config.passes_and_steps(client.n, batches_per_step, 1)
    order, augment = generators
    for client.epoch in range(passes):
        rows = trainer.data.train[client.id]
        size = config.batch_size or (len(rows) if batches_per_step > 1 else None)
        single = batches(rows, size, order, config.drop_last, augment=augment)
        for batch in single if batches_per_step == 1 else merge_batches(single, batches_per_step):
            if client.stops_on_request and trainer.stop():
                return
            client.last_epoch = steps <= steps_per_pass
            yield batch
            steps -= 1
            if not steps:
                return
