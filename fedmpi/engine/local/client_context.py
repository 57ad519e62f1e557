"""The engine's implementation of the `client` that hooks receive: data, messages, state, forward passes and gradients.

The round of a client is in client_round.py, its batch loop in training_loop.py.
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
from fedmpi.engine.hook_checks import ReadOnlyCheck, check_tensor, not_passed
from fedmpi.engine.local import client_round, training_loop
from fedmpi.engine.local.client_optimizers import OptimizerState
from fedmpi.engine.local.losses import add_regularizer, backward, checked, run_pass, weights_as_leaf
from fedmpi.engine.messages import compose_vector
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views, have_same_storage
from fedmpi.method.base import overrides
from fedmpi.method.context import Batch, Client, Loss, Part, Regularizer, State
from fedmpi.models.net import FeaturesAndHead
from fedmpi.models.recurrent import without_cudnn_rnn
from fedmpi.tasks import validation

NOTHING, NO_CONTEXT = Views({}), nullcontext()
Watch = Callable[[Any, Tensor], object]  # called with each step's batch, after the gradient, before w changes
EVALUATION_BATCH = 100  # samples; small batches stay in the cache


class ClientContext(Client):
    """The implementation of `method.context.Client`: one client that takes part in a round or is evaluated.

    Args:
        t: the round.
        lr: the learning rate of this round.
        announcement: the flat row that was broadcast to all clients (messages.py), on the model's device.
        download: the flat row of values for this client only.
        state_row: the flat row of the client's state.
    """

    def __init__(
        self,
        trainer: ClientTrainer,
        client: int,
        t: int,
        lr: float,
        announcement: Tensor,
        download: Tensor,
        state_row: Tensor,
    ) -> None:
        self.trainer, self.id, self.round, self.lr = trainer, client, t, lr
        self.announcement, self.download, self.state_row = announcement, download, state_row
        self.where = f"round {t}, client {client}"  # for error messages
        messages, data, config = trainer.messages, trainer.data, trainer.local_training
        self.n, self.classes, self.rounds = int(trainer.sizes[client]), data.classes, messages.rounds
        self.clients = data.clients
        if not data.label_counts_shared:
            trainer.set_class_counts(trainer.label_counts[client])
        self.batch_size, self.epoch, self.last_epoch = config.batch_size, 0, False
        self.steps, self.gradient_weight, self.fits = 0, trainer.initial_gradient_weight, 0
        self.w, self.b = trainer.model.w, trainer.model.b

        broadcast, kept = trainer.unpack_broadcast(announcement), messages.client_state.views(state_row)
        self.state = State({name: getattr(kept, name) for name in trainer.method.client_state})
        self.downloads = (
            broadcast.merge(messages.per_client_download.views(download))
            if messages.per_client_download.shapes
            else broadcast
        )
        size = messages.accumulators.size
        self.accumulator_row = state_row.new_zeros(size) if size else trainer.nothing
        self.accumulators = messages.accumulators.views(self.accumulator_row) if size else NOTHING
        self.received, self.b0 = broadcast._w, broadcast._b  # no copy if all parameters are sent
        if not messages.shared.selects_all:
            self.received = compose_vector(messages.shared, broadcast._w, messages.personal, kept._w)
        if not messages.shared_b.selects_all:
            self.b0 = compose_vector(messages.shared_b, broadcast._b, messages.personal_b, kept._b)
        self.w0 = self.received  # replaced when local training starts
        # torch's count of in-place writes to w at the time when w became w0; the engine's own writes are not counted.
        # None if w is not w0.
        self.version_at_w0: int | None = None

        self.losses: list[Tensor] = []  # of each step on client.w, not on other models
        self.step_loss: Tensor | None = None  # of the current step, at the current weights
        self.passed = True  # whether the current step has made the pass that updates batch statistics
        self.cut_short = True  # whether a stop request ends training; the upload then has a flag
        self.watch: Watch | None = None
        self.optim: OptimizerState | None = None  # only while training with train.persist_optimizer
        self._frozen: dict[int | None, tuple[Tensor | None, FeaturesAndHead]] = {}

    @property
    def at_w0(self) -> bool:  # type: ignore[override]
        return self.w._version == self.version_at_w0

    @property
    def label_counts(self) -> Tensor:  # type: ignore[override]
        return self.trainer.label_counts[self.id]

    run_round = client_round.run_round
    fit = training_loop.fit

    # ---- the round ----
    def read_only_check(self) -> ReadOnlyCheck:
        """Return a check that hooks do not write to the tensors that they may only read."""
        tensors = {
            "client.w0 (client.received) or client.downloads": self.announcement,
            "client.downloads": self.download,
            "client.state": self.state_row,
            "client.w0 (client.received)": self.received,  # a separate vector if the client keeps some parameters
            "client.label_counts": self.trainer.label_counts,
        }
        return ReadOnlyCheck({**tensors, "client.w": self.w, "client.b": self.b})

    def start(self) -> None:
        """Load the weights where training starts (hook `initial_weights`), and the optimiser state of earlier rounds.

        The hook changes neither buffers nor counters.
        """
        model = self.trainer.model
        if overrides(self.trainer.method, "initial_weights"):
            w0 = self.check("initial_weights", self.trainer.method.initial_weights(self))
            self.w0 = w0.clone() if have_same_storage(w0, model.w) else w0  # training is about to change client.w
            self._frozen.clear()  # frozen models of the w0 before the hook
            if self.w0 is not self.received:
                model.load(self.w0, self.b0)
        self.version_at_w0 = model.w._version
        if self.trainer.local_training.keep:
            self.optim = OptimizerState(self.trainer.messages.client_state.views(self.state_row), model.layout)

    def fine_tune(self, epochs: int) -> None:
        """Fine-tune the current weights by the hook `finetune`, for the protocol ft(epochs); nothing is stored."""
        self.trainer.model.module.train()
        self.cut_short = False  # a stop request must not shorten an evaluation
        self.version_at_w0 = self.w._version if torch.equal(self.w, self.w0) else None
        with seeds.temporary_seed(self.trainer.seed, "tune", self.round, self.id):
            self.trainer.method.finetune(self, epochs)

    # ---- forward passes ----
    def logits(self, x: Tensor) -> Tensor:
        trainer, module = self.trainer, self.trainer.model.module
        positional, named = to_call_arguments(module, x)
        try:
            with trainer.precision() if trainer.bf16 else NO_CONTEXT:
                f: Tensor = module(*positional, **named)
            return f if f.dtype is self.w.dtype else f.to(self.w.dtype)
        except Exception as error:
            raise not_passed(module, x, error) from error

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        try:
            with self.trainer.precision():
                z, f = self.trainer.net.forward(x)
            assert z is not None  # methods that call this declare needs = {FEATURES}, checked at the start
            return z.to(self.w.dtype), f.to(self.w.dtype)
        except Exception as error:
            raise not_passed(self.trainer.model.module, x, error) from error

    def reference_forward(
        self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        key = None if at is None else id(at)
        with torch.inference_mode(False), torch.no_grad(), self.trainer.precision():  # evaluation is in inference mode
            if key not in self._frozen:
                model, net = self.trainer.frozen_copy(len(self._frozen))
                self._frozen[key] = at, net  # keeps the tensor alive, so that no other one gets its id
                model.load(self.w0 if at is None else at, self.b0 if buffers is None else buffers)
            z, f = self._frozen[key][1].forward(x)
        return (f if z is None else z).to(self.w.dtype), f.to(self.w.dtype)

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.trainer.task.loss(lambda _: f, x, y)
        return loss

    def mean_loss(self, at: Tensor, part: Part = "validation") -> Tensor:
        data, task = self.trainer.data, self.trainer.task
        shard = (data.train if part == "train" else data.validation)[self.id]
        total = torch.zeros((), dtype=torch.float64, device=self.w.device)
        weight: int | Tensor = 0
        pairs: list[tuple[Tensor, Tensor]] = []
        with self.elsewhere(at), self._evaluating():
            for x, y in batches(shard, EVALUATION_BATCH, None):
                f = self.logits(x)
                of_batch = task.batch_weight(y)
                total, weight = total + self.task_loss(f, x, y) * of_batch, weight + of_batch
                pairs.append((validation.reduce_outputs(task, f, y), y))
            whole = validation.split_loss(task, *map(torch.cat, zip(*pairs, strict=True))) if pairs else None
        return total / weight if whole is None else whole.double()

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
        with self._one_pass(at, buffers):
            value = run_pass(self, loss or self.trainer.direct or self.trainer.method.loss, True, x, y)
        if loss is None:
            self.note(value)
        return self.trainer.model.attach_gradient().clone()

    def regularizer_grad(self, regularizer: Regularizer) -> Tensor:
        return add_regularizer(self, regularizer, self.w, torch.zeros_like(self.w))

    def hessian_vector_product(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        model = self.trainer.model
        members = [(s, p) for s, p in model.segment_parameters if p.requires_grad]
        with self._one_pass(None, None), without_cudnn_rnn(model.module), weights_as_leaf(self, self.w) as leaf:
            loss = checked(self, self.trainer.method.loss(self, x, y), "loss")
        weights: list[Tensor] = [*(p for _, p in members), leaf]
        vs = [*(s.view(v) for s, _ in members), v]
        grad = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)  # zeros for unused tensors
        g = grad(loss, weights, create_graph=True)
        along = torch.stack([(piece * each).sum() for piece, each in zip(g, vs, strict=True)]).sum()
        pieces = grad(along, weights)
        out = pieces[-1].clone()
        for (s, _), piece in zip(members, pieces, strict=False):
            s.view(out).add_(piece)
        return out

    def head_grad(self, z: Tensor, loss: Callable[[Tensor], Tensor], *, at: Tensor | None = None) -> Tensor:
        model, head = self.trainer.model, self.trainer.messages.head
        before = None if at is None else head.take(model.w).clone()
        if at is not None:
            head.put(head.take(at), model.w_data)
        model.attach_gradient().zero_()
        assert self.trainer.net.head is not None  # as in `forward`
        with self.trainer.precision():
            f: Tensor = self.trainer.net.head(z)
        value = checked(self, loss(f.to(self.w.dtype)), "loss", loss)
        backward(value)
        if before is not None:
            head.put(before, model.w_data)  # copying restores the weights exactly, subtracting would not
        if z.requires_grad:
            self.note(value)
        return model.attach_gradient().clone()

    def check(self, hook: str, value: Any, shape: tuple[int, ...] | None = None, by: Any = None) -> Tensor:
        """Check the shape of a hook's result, (d,) if `shape` is None, and return it without its autograd graph."""
        shape = tuple(self.w.shape) if shape is None else shape
        check_tensor(self.trainer.method, hook, value, shape, self.where, self.w, by)
        return value.detach() if shape and value.requires_grad else value

    def note(self, loss: Tensor) -> None:
        """Record the first loss of a step, which is the one at the current weights, and ignore later ones."""
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
        size = self.batch_size or (self.n if generator else None)
        return batches(self.trainer.data.train[self.id], size, generator)

    def forward_batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        with self._evaluating():
            for x, y in batches(self.trainer.data.train[self.id], EVALUATION_BATCH, None):
                yield (*self.forward(x), y)

    def generator(self, *purpose: str | int) -> torch.Generator:
        return seeds.torch_generator(self.trainer.seed, "client", self.id, *purpose)

    @contextmanager
    def _one_pass(self, at: Tensor | None, buffers: Tensor | None) -> Iterator[None]:
        """Load weights `at` (d,) and buffers for one pass of a step within this context, then restore the current ones.

        The first pass of a step updates batch statistics, at any weights, unless `buffers` are given; further passes
        do not.
        """
        model, passed, again = self.trainer.model, self.passed, self.passed or buffers is not None
        at_w0 = self.version_at_w0
        self.passed = self.passed or buffers is None
        w = None if at is None else model.w.clone()
        statistics = (model.b.clone(), [counter.clone() for counter in model.batch_counters]) if again else ()
        if at is not None or buffers is not None:
            # A cumulative average counts only the batches of its own passes, one in each step.
            counted = [(c - int(passed)).clamp_(min=0) for c in statistics[1]] if statistics else None
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
    def elsewhere(self, w: Tensor, b: Tensor | None = None) -> Iterator[None]:
        """Load another model, w (d,) and b (b,), within this context, without recording its losses; then restore."""
        model = self.trainer.model
        before = model.w.clone(), model.b.clone(), [counter.clone() for counter in model.batch_counters]
        names = ("version_at_w0", "steps", "gradient_weight", "losses", "watch", "optim")
        own = {name: getattr(self, name) for name in names}
        self.version_at_w0, self.losses, self.watch, self.optim = None, [], None, None
        model.load(w, b)
        try:
            yield
        finally:
            model.load(*before)
            vars(self).update(own)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Set evaluation mode without gradients within this context, then restore the previous mode."""
        module = self.trainer.model.module
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            module.train(training)
