"""What a hook sees of one client in one round: its data, its messages and state, forward passes, gradient oracles.

Its round is client_round.py, its batch loop training_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.inputs import arguments
from fedmpi.data.batches import batches
from fedmpi.engine.checks import ReadOnlyCheck, check_tensor, not_passed
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.local import client_round, training_loop
from fedmpi.engine.local.losses import add_regularizer, backward, checked, run_pass, weights_as_leaf
from fedmpi.engine.local.optimizers import OptimizerState
from fedmpi.engine.messages import compose
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views, share_memory
from fedmpi.method.base import overrides
from fedmpi.method.context import Batch, Client, Loss, Part, Regularizer, State
from fedmpi.models.net import Net
from fedmpi.models.recurrent import differentiable
from fedmpi.tasks import contract

NOTHING, NO_CONTEXT = Views({}), nullcontext()
Watch = Callable[[Any, Tensor], object]  # called with each step's batch when its gradient is there, before w moves
EVALUATION_BATCH = 100  # samples; small batches stay in the cache


class ClientContext(Client):
    """The engine's side of `method.context.Client`: one client that takes part in a round, or is evaluated.

    announcement, download, state_row: flat rows (messages.py) on the model's device.
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
        self.where = f"round {t}, client {client}"  # in messages
        messages, data, config = trainer.messages, trainer.data, trainer.local_training
        self.n, self.classes, self.rounds = int(trainer.sizes[client]), data.classes, messages.rounds
        self.clients = data.clients
        if not data.counts_shared:
            trainer.weigh(trainer.label_counts[client])
        self.batch_size, self.epoch, self.last_epoch = config.batch_size, 0, False
        self.steps, self.a, self.fits = 0, trainer.a0, 0
        self.w, self.b = trainer.model.w, trainer.model.b

        broadcast, kept = trainer.unpack_broadcast(announcement), messages.client_state.views(state_row)
        self.state = State({name: getattr(kept, name) for name in trainer.method.client_state})
        self.down = broadcast.beside(messages.per_client.views(download)) if messages.per_client.shapes else broadcast
        size = messages.scratch.size
        self.scratch_row = state_row.new_zeros(size) if size else trainer.nothing
        self.scratch = messages.scratch.views(self.scratch_row) if size else NOTHING
        self.received, self.b0 = broadcast._w, broadcast._b  # no copy where everything travels
        if not messages.shared.whole:
            self.received = compose(messages.shared, broadcast._w, messages.personal, kept._w)
        if not messages.shared_b.whole:
            self.b0 = compose(messages.shared_b, broadcast._b, messages.personal_b, kept._b)
        self.w0 = self.received  # until local training begins
        # When w became w0: how often hooks had written to it by torch's count, which leaves out writes of the engine.
        # None where w is not w0.
        self.version_at_w0: int | None = None

        self.losses: list[Tensor] = []  # of the steps of the client's own model
        self.step_loss: Tensor | None = None  # of the step at hand, at the live weights
        self.passed = True  # whether the step at hand has made the pass that moves batch statistics
        self.cut_short = True  # by a request to stop, of which the upload tells
        self.watch: Watch | None = None
        self.optim: OptimizerState | None = None  # of a client that trains, with train.keep_optim
        self._frozen: dict[int | None, tuple[Tensor | None, Net]] = {}

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
        """Return a check of the tensors that the client's hooks only read."""
        tensors = {
            "client.w0 (client.received) or client.down": self.announcement,
            "client.down": self.download,
            "client.state": self.state_row,
            "client.w0 (client.received)": self.received,  # its own vector where parts stay with the client
            "client.label_counts": self.trainer.label_counts,
        }
        return ReadOnlyCheck({**tensors, "client.w": self.w, "client.b": self.b})

    def start(self) -> None:
        """Set what training starts from: the weights of the hook `receive`, and the optimiser that the client keeps.

        The hook moves neither buffers nor counters.
        """
        model = self.trainer.model
        if overrides(self.trainer.method, "receive"):
            w0 = self.check("receive", self.trainer.method.receive(self))
            self.w0 = w0.clone() if share_memory(w0, model.w) else w0  # client.w is about to move
            self._frozen.clear()  # of the w0 from before
            if self.w0 is not self.received:
                model.load(self.w0, self.b0)
        self.version_at_w0 = model.w._version
        if self.trainer.local_training.keep:
            self.optim = OptimizerState(self.trainer.messages.client_state.views(self.state_row), model.layout)

    def fine_tune(self, epochs: int) -> None:
        """The method's fine-tuning from the weights at hand; nothing of it is kept.   FT(e)"""
        self.trainer.model.module.train()
        self.cut_short = False  # what is measured does not go up with a word of it
        self.version_at_w0 = self.w._version if torch.equal(self.w, self.w0) else None
        with seeds.seeded(self.trainer.seed, "tune", self.round, self.id):
            self.trainer.method.tune(self, epochs)

    # ---- forward passes ----
    def logits(self, x: Tensor) -> Tensor:
        trainer, module = self.trainer, self.trainer.model.module
        positional, named = arguments(module, x)
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

    def frozen(self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        key = None if at is None else id(at)
        with torch.inference_mode(False), torch.no_grad(), self.trainer.precision():  # evaluation is in that mode
            if key not in self._frozen:
                model, net = self.trainer.twin(len(self._frozen))
                self._frozen[key] = at, net  # keeps the tensor alive, or its id could be given to another one
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
                pairs.append((contract.hold(task, f, y), y))
            whole = contract.whole_loss(task, *map(torch.cat, zip(*pairs, strict=True))) if pairs else None
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

    def hessian_vector(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        model = self.trainer.model
        members = [(s, p) for s, p in model.members if p.requires_grad]
        with self._one_pass(None, None), differentiable(model.module), weights_as_leaf(self, self.w) as leaf:
            loss = checked(self, self.trainer.method.loss(self, x, y), "loss")
        weights: list[Tensor] = [*(p for _, p in members), leaf]
        vs = [*(s.view(v) for s, _ in members), v]
        grad = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)  # zero of what is not used
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
            head.put(head.take(at), model.live)
        model.attach_gradient().zero_()
        assert self.trainer.net.head is not None  # as in `forward`
        with self.trainer.precision():
            f: Tensor = self.trainer.net.head(z)
        value = checked(self, loss(f.to(self.w.dtype)), "loss", loss)
        backward(value)
        if before is not None:
            head.put(before, model.live)  # copied back, not subtracted: exactly the weights from before
        if z.requires_grad:
            self.note(value)
        return model.attach_gradient().clone()

    def check(self, hook: str, value: Any, shape: tuple[int, ...] | None = None, by: Any = None) -> Tensor:
        """`value` without its graph if it has the shape that the hook must return, (d,) where none is given."""
        shape = tuple(self.w.shape) if shape is None else shape
        check_tensor(self.trainer.method, hook, value, shape, self.where, self.w, by)
        return value.detach() if shape and value.requires_grad else value

    def note(self, loss: Tensor) -> None:
        """The first loss of a step is the one at the live weights: that which is recorded."""
        if self.step_loss is None:
            self.step_loss = loss.detach()

    # ---- the flat vector's parts, the client's data ----
    def take(self, group: str, flat: Tensor) -> Tensor:
        self.trainer.messages.check_groups((group,), "client.take")
        return self.trainer.model.layout.select({group}).take(flat)

    def lift(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        self.trainer.messages.check_groups((group,), "client.lift")
        out = into.clone()
        self.trainer.model.layout.select({group}).put(part, out)
        return out

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        self.trainer.messages.check_groups(groups or (), "client.segments")
        return [s for s in self.trainer.model.layout.segments if groups is None or s.group in groups]

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        size = self.batch_size or (self.n if generator else None)
        return batches(self.trainer.data.train[self.id], size, generator)

    def passes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        with self._evaluating():
            for x, y in batches(self.trainer.data.train[self.id], EVALUATION_BATCH, None):
                yield (*self.forward(x), y)

    def generator(self, *purpose: str | int) -> torch.Generator:
        return seeds.generator(self.trainer.seed, "client", self.id, *purpose)

    @contextmanager
    def _one_pass(self, at: Tensor | None, buffers: Tensor | None) -> Iterator[None]:
        """One of a step's passes. The first moves batch statistics, wherever it is, unless it has buffers of its own;
        the others leave them alone."""
        model, passed, again = self.trainer.model, self.passed, self.passed or buffers is not None
        at_w0 = self.version_at_w0
        self.passed = self.passed or buffers is None
        w = None if at is None else model.w.clone()
        statistics = (model.b.clone(), [counter.clone() for counter in model.counters]) if again else ()
        if at is not None or buffers is not None:
            # a cumulative average counts the batches of its own passes: one a step
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
        """Within, the model is another one, which no record is kept of; afterwards all is exactly what it was."""
        model = self.trainer.model
        before = model.w.clone(), model.b.clone(), [counter.clone() for counter in model.counters]
        names = ("version_at_w0", "steps", "a", "losses", "watch", "optim")
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
        """Evaluation mode without gradients; afterwards the mode from before."""
        module = self.trainer.model.module
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            module.train(training)
