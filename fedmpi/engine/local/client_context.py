"""The engine's implementation of the `client` that hooks receive: data, messages, state, forward passes and gradients.

client_round.py contains the round of a client, training_loop.py its training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.inputs import to_call_arguments
from fedmpi.data.batches import batches
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.hook_checks import ReadOnlyCheck, check_tensor, forward_error, require_unprotected_samples
from fedmpi.engine.local import client_round, training_loop
from fedmpi.engine.local.client_optimizers import OptimizerState
from fedmpi.engine.local.losses import (
    add_regularizer,
    backward,
    check_loss,
    count_parts,
    keep_batch_statistics,
    run_pass,
    split_batch,
    weights_as_leaf,
)
from fedmpi.engine.messages import compose_vector
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views, have_same_storage
from fedmpi.method.base import overrides
from fedmpi.method.context import Batch, Client, Loss, Part, Regularizer, State
from fedmpi.models.net import FeaturesAndHead
from fedmpi.models.recurrent import without_cudnn_rnn
from fedmpi.tasks import validation

EMPTY_VIEWS, NO_CONTEXT = Views({}), nullcontext()
# Called in each step with its batch, after the gradient has been computed and before w changes.
StepCallback = Callable[[Any, Tensor], object]
EVALUATION_BATCH_SIZE = 100  # samples; small batches stay in the cache


class ClientContext(Client):
    """One client that takes part in a round or is evaluated; the implementation of `method.context.Client`.

    Args:
        trainer: the model, method and data of this rank.
        client: the id of the client.
        lr: the learning rate of the round.
        broadcast_row: the flat row that was broadcast to all clients (messages.py), on the model's device.
        download_row: the flat row of values for this client only.
        state_row: the flat row of the client's state.
    """

    def __init__(
        self,
        trainer: ClientTrainer,
        client: int,
        t: int,
        lr: float,
        broadcast_row: Tensor,
        download_row: Tensor,
        state_row: Tensor,
    ) -> None:
        self.trainer, self.id, self.round, self.lr = trainer, client, t, lr
        self.broadcast_row, self.download_row, self.state_row = broadcast_row, download_row, state_row
        self.where = f"round {t}, client {client}"  # for error messages
        messages, data, config = trainer.messages, trainer.data, trainer.local_training
        self.n, self.classes, self.rounds = int(trainer.train_sizes[client]), data.classes, messages.rounds
        self.clients = data.clients
        if not data.label_counts_shared:
            trainer.set_class_counts(trainer.label_counts[client])
        self.batch_size, self.accumulate, self.epoch, self.last_epoch = config.batch_size, config.accumulate, 0, False
        self.task_loss_scale: Tensor | None = None  # for a part of a batch (losses.py); None: 1
        self.steps, self.gradient_weight, self.num_fits = 0, trainer.initial_gradient_weight, 0
        self.private_steps = 0  # steps of all fits of the round, for the noise of differential privacy
        self.w, self.b = trainer.model.w, trainer.model.b

        broadcast, own = trainer.unpack_broadcast(broadcast_row), messages.client_state.views(state_row)
        self.state = State({name: getattr(own, name) for name in trainer.method.client_state})
        self.downloads = broadcast
        if messages.per_client_download.shapes:
            self.downloads = broadcast.with_overrides(messages.per_client_download.views(download_row))
        size = messages.accumulators.size
        self.accumulator_row = state_row.new_zeros(size) if size else trainer.empty_row
        self.accumulators = messages.accumulators.views(self.accumulator_row) if size else EMPTY_VIEWS
        self.received, self.b0 = broadcast._w, broadcast._b  # no copy if all parameters are sent
        if not messages.shared.selects_all:
            self.received = compose_vector(messages.shared, broadcast._w, messages.personal, own._w)
        if not messages.shared_b.selects_all:
            self.b0 = compose_vector(messages.shared_b, broadcast._b, messages.personal_b, own._b)
        self.w0 = self.received  # replaced when local training starts
        # torch's version counter of w when w became w0, which counts in-place writes; None if w is not w0. The engine
        # writes to w without changing the counter.
        self.version_at_w0: int | None = None

        self.losses: list[Tensor] = []  # loss of each step on client.w; steps on other models are not recorded
        self.step_loss: Tensor | None = None  # loss of the current step, at the current weights
        self.has_passed = True  # whether the current step has already updated batch statistics
        self.stops_on_request = True  # whether a stop request ends training; a flag in the upload then says so
        self.on_step: StepCallback | None = None
        self.optimizer_state: OptimizerState | None = None  # only while training with train.persist_optimizer
        self._frozen: dict[int | None, tuple[Tensor | None, FeaturesAndHead]] = {}

    @property
    def at_w0(self) -> bool:  # type: ignore[override]
        return self.w._version == self.version_at_w0

    @property
    def label_counts(self) -> Tensor:  # type: ignore[override]
        require_unprotected_samples(self, "label_counts")
        return self.trainer.label_counts[self.id]

    run_round = client_round.run_round
    fit = training_loop.fit

    # ---- the round ----
    def read_only_check(self) -> ReadOnlyCheck:
        """Return an object that detects writes by hooks to tensors that they may only read."""
        tensors = {
            "client.w0 (client.received) or client.downloads": self.broadcast_row,
            "client.downloads": self.download_row,
            "client.state": self.state_row,
            "client.w0 (client.received)": self.received,  # a separate vector if some parameters are personal
            "client.label_counts": self.trainer.label_counts,
        }
        return ReadOnlyCheck({**tensors, "client.w": self.w, "client.b": self.b})

    def load_start_state(self) -> None:
        """Load the weights from which training starts, and the optimiser state of earlier rounds.

        The weights are the result of the hook `initial_weights`; buffers keep the received values.
        """
        model = self.trainer.model
        if overrides(self.trainer.method, "initial_weights"):
            w0 = self.check_result("initial_weights", self.trainer.method.initial_weights(self))
            self.w0 = w0.clone() if have_same_storage(w0, model.w) else w0  # training is about to change client.w
            self._frozen.clear()  # the hook may have used frozen models with the previous w0
            if self.w0 is not self.received:
                model.load(self.w0, self.b0)
        self.version_at_w0 = model.w._version
        if self.trainer.local_training.persist_optimizer:
            self.optimizer_state = OptimizerState(
                self.trainer.messages.client_state.views(self.state_row), model.layout
            )

    def fine_tune(self, epochs: int) -> None:
        """Fine-tune the current weights with the hook `finetune`, for an evaluation with the protocol ft(epochs)."""
        self.trainer.model.module.train()
        self.stops_on_request = False  # a stop request must not shorten an evaluation
        self.version_at_w0 = self.w._version if torch.equal(self.w, self.w0) else None
        with seeds.temporary_seed(self.trainer.seed, "tune", self.round, self.id):
            self.trainer.method.finetune(self, epochs)

    # ---- forward passes ----
    def logits(self, x: Tensor) -> Tensor:
        trainer, module = self.trainer, self.trainer.model.module
        positional, named = to_call_arguments(module, x)
        try:
            with trainer.autocast_context() if trainer.bf16 else NO_CONTEXT:
                f: Tensor = module(*positional, **named)
            return f if f.dtype is self.w.dtype else f.to(self.w.dtype)
        except Exception as error:
            raise forward_error(module, x, error) from error

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        try:
            with self.trainer.autocast_context():
                z, f = self.trainer.net.forward(x)
            assert z is not None  # methods that call this declare needs = {FEATURES}, checked at the start
            return z.to(self.w.dtype), f.to(self.w.dtype)
        except Exception as error:
            raise forward_error(self.trainer.model.module, x, error) from error

    def reference_forward(
        self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        key = None if at is None else id(at)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            self.trainer.autocast_context(),
        ):  # evaluation is in inference mode
            if key not in self._frozen:
                model, net = self.trainer.frozen_copy(len(self._frozen))
                self._frozen[key] = at, net  # keeps the tensor alive, so that no other one gets its id
                model.load(self.w0 if at is None else at, self.b0 if buffers is None else buffers)
            z, f = self._frozen[key][1].forward(x)
        return (f if z is None else z).to(self.w.dtype), f.to(self.w.dtype)

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.trainer.task.loss(lambda _: f, x, y)
        return loss if self.task_loss_scale is None else loss * self.task_loss_scale.to(loss.dtype)

    def mean_loss(self, at: Tensor, part: Part = "validation") -> Tensor:
        require_unprotected_samples(self, "mean_loss")
        data, task = self.trainer.data, self.trainer.task
        shard = (data.train if part == "train" else data.validation)[self.id]
        total = torch.zeros((), dtype=torch.float64, device=self.w.device)
        weight: int | Tensor = 0
        pairs: list[tuple[Tensor, Tensor]] = []
        with self.temporary_model(at), self._evaluating():
            for x, y in batches(shard, EVALUATION_BATCH_SIZE, None):
                f = self.logits(x)
                batch_weight = task.batch_weight(y)
                total, weight = total + self.task_loss(f, x, y) * batch_weight, weight + batch_weight
                pairs.append((validation.reduce_outputs(task, f, y), y))
            full_loss = validation.split_loss(task, *map(torch.cat, zip(*pairs, strict=True))) if pairs else None
        return total / weight if full_loss is None else full_loss.double()

    # ---- gradient oracles ----
    def grad(
        self,
        x: Tensor,
        y: Tensor,
        *,
        at: Tensor | None = None,
        loss: Loss | None = None,
        buffers: Tensor | None = None,
    ) -> Tensor:
        require_unprotected_samples(self, "grad")
        # A loss that the method passes is split only if the method declares that this is possible.
        is_undivided = self.accumulate == 1 or (loss and not self.trainer.method.loss_is_sample_mean)
        parts = 1 if is_undivided else count_parts(self, len(y))
        with self._weights_for_one_pass(at, buffers, parts):
            value = run_pass(self, loss or self.trainer.fast_loss or self.trainer.method.loss, True, x, y, parts)
        if loss is None:
            self.record_loss(value)
        return self.trainer.model.attach_gradient().clone()

    def regularizer_grad(self, regularizer: Regularizer) -> Tensor:
        return add_regularizer(self, regularizer, self.w, torch.zeros_like(self.w))

    def hessian_vector_product(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        require_unprotected_samples(self, "hessian_vector_product")
        model = self.trainer.model
        members = [(s, p) for s, p in model.segment_parameters if p.requires_grad]
        vs, out = [*(s.view(v) for s, _ in members), v], torch.zeros_like(v)
        grad = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)  # zeros for unused tensors
        parts = split_batch(self, x, y, 1 if self.accumulate == 1 else count_parts(self, len(y)))
        with self._weights_for_one_pass(None, None), without_cudnn_rnn(model.module):
            for part_x, part_y, share, self.task_loss_scale in parts:
                with weights_as_leaf(self, self.w) as leaf:
                    loss = check_loss(self, self.trainer.method.loss(self, part_x, part_y), "loss")
                weights: list[Tensor] = [*(p for _, p in members), leaf]
                with keep_batch_statistics(self):
                    g = grad(loss, weights, create_graph=True)
                    along = torch.stack([(piece * each).sum() for piece, each in zip(g, vs, strict=True)]).sum()
                    pieces = grad(along, weights)
                out.add_(pieces[-1], alpha=share)
                for (s, _), piece in zip(members, pieces, strict=False):
                    s.view(out).add_(piece, alpha=share)
        self.task_loss_scale = None
        return out

    def head_grad(self, z: Tensor, loss: Callable[[Tensor], Tensor], *, at: Tensor | None = None) -> Tensor:
        require_unprotected_samples(self, "head_grad")
        model, head = self.trainer.model, self.trainer.messages.head
        before = None if at is None else head.take(model.w).clone()
        if at is not None:
            head.put(head.take(at), model.w_data)
        model.attach_gradient().zero_()
        assert self.trainer.net.head is not None  # as in `forward`
        with self.trainer.autocast_context():
            f: Tensor = self.trainer.net.head(z)
        value = check_loss(self, loss(f.to(self.w.dtype)), "loss", loss)
        with keep_batch_statistics(self):
            backward(value)
        if before is not None:
            head.put(before, model.w_data)  # copying restores the weights exactly, subtracting would not
        if z.requires_grad:
            self.record_loss(value)
        return model.attach_gradient().clone()

    def check_result(self, hook: str, value: Any, shape: tuple[int, ...] | None = None, by: Any = None) -> Tensor:
        """Check the shape of a hook's result, and return the result.

        A scalar keeps its autograd graph; other results are detached from theirs.

        Args:
            shape: the required shape; by default (d,).
            by: the function that returned the value, if it is not the method's own hook.

        Raises:
            UserError: the result is not a tensor of this shape.
        """
        shape = tuple(self.w.shape) if shape is None else shape
        check_tensor(self.trainer.method, hook, value, shape, self.where, self.w, by)
        return value.detach() if shape and value.requires_grad else value

    def record_loss(self, loss: Tensor) -> None:
        """Record the loss of the current step; later calls in the same step have no effect.

        The first loss that a step computes is the loss at the current weights.
        """
        if self.step_loss is None:
            self.step_loss = loss.detach()

    # ---- the flat vector's parts, the client's data ----
    def extract_group(self, group: str, flat: Tensor) -> Tensor:
        self.trainer.messages.check_groups((group,), "client.extract_group")
        return self.trainer.model.layout.select({group}).take(flat)

    def replace_group(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        self.trainer.messages.check_groups((group,), "client.replace_group")
        out = into.clone()
        self.trainer.model.layout.select({group}).put(part, out)
        return out

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        self.trainer.messages.check_groups(groups or (), "client.segments")
        return [s for s in self.trainer.model.layout.segments if groups is None or s.group in groups]

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        require_unprotected_samples(self, "batches")
        size = self.batch_size or (self.n if generator else None)
        return batches(self.trainer.data.train[self.id], size, generator)

    def forward_batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        require_unprotected_samples(self, "forward_batches")
        with self._evaluating():
            for x, y in batches(self.trainer.data.train[self.id], EVALUATION_BATCH_SIZE, None):
                yield (*self.forward(x), y)

    def generator(self, *purpose: str | int) -> torch.Generator:
        return seeds.torch_generator(self.trainer.seed, "client", self.id, *purpose)

    @contextmanager
    def _weights_for_one_pass(self, at: Tensor | None, buffers: Tensor | None, parts: int = 1) -> Iterator[None]:
        """Context manager: load weights `at` (d,) and `buffers` (b,) for one pass of a step, then restore the model.

        A pass with `buffers` updates them in place. Without `buffers`, only the first pass of a step updates the
        model's batch statistics, even if that pass uses other weights. A pass consists of `parts` forward passes.
        """
        model, passed, keeps_statistics = self.trainer.model, self.has_passed, self.has_passed or buffers is not None
        at_w0 = self.version_at_w0
        self.has_passed = self.has_passed or buffers is None
        w = None if at is None else model.w.clone()
        statistics = (
            (model.b.clone(), [counter.clone() for counter in model.batch_counters]) if keeps_statistics else ()
        )
        if at is not None or buffers is not None:
            # A cumulative average counts only the batches of its own passes, one pass in each step.
            counted = [(c - parts * passed).clamp_(min=0) for c in statistics[1]] if statistics else None
            model.load(model.w if at is None else at, buffers, counted)
            self.version_at_w0 = None if at is not None else at_w0
        try:
            yield
            if buffers is not None:
                buffers.copy_(model.b)
        finally:
            if statistics or w is not None:
                model.load(model.w if w is None else w, *statistics)
            self.version_at_w0 = at_w0

    @contextmanager
    def temporary_model(self, w: Tensor, b: Tensor | None = None) -> Iterator[None]:
        """Context manager: load weights w (d,) and buffers b (None: keep the buffers), then restore the model.

        The client's losses, number of steps and optimiser state are also restored.
        """
        model = self.trainer.model
        before = model.w.clone(), model.b.clone(), [counter.clone() for counter in model.batch_counters]
        names = ("version_at_w0", "steps", "gradient_weight", "losses", "on_step", "optimizer_state")
        own = {name: getattr(self, name) for name in names}
        self.version_at_w0, self.losses, self.on_step, self.optimizer_state = None, [], None, None
        model.load(w, b)
        try:
            yield
        finally:
            model.load(*before)
            vars(self).update(own)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context manager: switch to evaluation mode without gradients, then restore the previous mode."""
        module = self.trainer.model.module
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            module.train(training)
